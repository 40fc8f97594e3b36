"""The rows of a table group at the end of a checkpoint chain, one file at a time.

Goes from the last checkpoint back to the first.  A key that was seen already has a later row, or was removed later,
and is skipped.  Memory holds one file, and the keys that changed since the first checkpoint of the chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from nestpipe.checkpoint.errors import RECOVERY_HINT, CheckpointError
from nestpipe.checkpoint.folder import Checkpoint
from nestpipe.checkpoint.row_files import DuplicateKeyCheck, count_rows, read_rows
from nestpipe.keys import HashIndex
from nestpipe.tables.snapshot import Rows


def merged_rows(
    chain: list[Checkpoint], group: int, on_progress: Callable[[float], None] = lambda done: None
) -> Iterator[Rows]:
    """All rows of a group, in the order of the files.  Raises CheckpointError, perhaps only at the end."""
    files = [(c, f) for c in reversed(chain) for f in c.manifest.files if f.group == group]
    total, done, given = sum(file.bytes for _, file in files), 0, 0
    changed = HashIndex(1 + sum(count_rows(checkpoint, group) for checkpoint in chain[1:]))
    for checkpoint in reversed(chain):
        first = checkpoint is chain[0]
        duplicates = DuplicateKeyCheck(0 if first else count_rows(checkpoint, group))
        for kind in ("rows", "removed"):
            for file in (file for c, file in files if c is checkpoint and file.kind == kind):
                rows = read_rows(checkpoint, file)
                done += file.bytes
                on_progress(done / total)
                fresh = changed.find(rows.keys, rows.tables) < 0 if len(changed) else None
                if not first:
                    if kind == "rows":
                        duplicates.add(rows, checkpoint, file)
                    changed.insert(rows.keys, rows.tables)
                if kind == "rows":
                    rows = rows if fresh is None or fresh.all() else select(rows, fresh)
                    given += len(rows)
                    yield rows
    wanted = chain[-1].manifest.groups[group].rows
    if given != wanted:
        raise CheckpointError(
            f"{chain[-1].path}: group {group} has {given:,} rows in its files and {wanted:,} in its manifest; "
            f"{RECOVERY_HINT}"
        )


def select(rows: Rows, which: np.ndarray) -> Rows:
    return Rows(rows.tables[which], rows.keys[which], rows.values[which], rows.state[which])
