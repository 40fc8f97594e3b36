"""The rows of a table group as a chain of checkpoints has them at its end, a file at a time.

From the last checkpoint back to the first: what was met already is of a later one and wins, and keys that went stay away.  In
memory are one file and the keys that changed since the first checkpoint of the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.folder import Checkpoint
from nestpipe.checkpoint.row_files import NoKeyTwice, count_rows, read_rows
from nestpipe.checkpoint.tensors import OTHERWISE
from nestpipe.keys import HashIndex
from nestpipe.tables.snapshot import Rows


def merged_rows(
    chain: list[Checkpoint], group: int, tell: Callable[[float], None] = lambda done: None
) -> Iterator[Rows]:
    """All rows of a group, in the order of the files.  CheckpointError, at the end at the latest, if anything is wrong."""
    files = [(c, f) for c in reversed(chain) for f in c.manifest.files if f.group == group]
    total, done, given = sum(file.bytes for _, file in files), 0, 0
    changed = HashIndex(1 + sum(count_rows(checkpoint, group) for checkpoint in chain[1:]))
    for checkpoint in reversed(chain):
        first = checkpoint is chain[0]
        once = NoKeyTwice(0 if first else count_rows(checkpoint, group))
        for kind in ("rows", "removed"):
            for file in (file for c, file in files if c is checkpoint and file.kind == kind):
                rows = read_rows(checkpoint, file)
                done += file.bytes
                tell(done / total)
                fresh = changed.find(rows.keys, rows.tables) < 0 if len(changed) else None
                if not first:
                    if kind == "rows":
                        once.add(rows, checkpoint, file)
                    changed.insert(rows.keys, rows.tables)
                if kind == "rows":
                    rows = rows if fresh is None or fresh.all() else chosen(rows, fresh)
                    given += len(rows)
                    yield rows
    wanted = chain[-1].manifest.groups[group].rows
    if given != wanted:
        raise CheckpointError(
            f"{chain[-1].path}: group {group} has {given:,} rows in its files and {wanted:,} in its manifest; {OTHERWISE}"
        )


def chosen(rows: Rows, which: np.ndarray) -> Rows:
    return Rows(rows.tables[which], rows.keys[which], rows.values[which], rows.state[which])
