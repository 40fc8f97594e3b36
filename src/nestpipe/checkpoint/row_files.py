"""Reads files of rows and of removed keys.  A file is used only after every check has passed.

The checks: digest; names, shapes and dtypes of the tensors; table numbers; the worker owns every key; no key occurs
twice.
"""

from __future__ import annotations

import numpy as np

from nestpipe.checkpoint.errors import RECOVERY_HINT, CheckpointError
from nestpipe.checkpoint.folder import Checkpoint
from nestpipe.checkpoint.manifest import File
from nestpipe.checkpoint.tensors import Read, read_arrays
from nestpipe.keys import HashIndex, dedup_pairs, owners_of
from nestpipe.tables.snapshot import Rows


def in_order(files: list[File]) -> list[File]:
    """The files of one checkpoint that change tables: removals first, as a removed key may have come back."""
    return [f for f in files if f.kind == "removed"] + [f for f in files if f.kind == "rows"]


def read_rows(checkpoint: Checkpoint, file: File, read: Read | None = None) -> Rows:
    """The rows of a file.  Removed keys have values and state of width 0.  `read`: in place of `read_tensors`."""
    path = checkpoint.path / file.name
    group = checkpoint.manifest.groups[file.group]
    arrays = read_arrays(path, file.written, read)
    n, dtype = file.rows, np.dtype(group.dtype)
    wanted: dict[str, tuple[tuple[int, ...], np.dtype]] = {
        "keys": ((n,), np.dtype(np.int64)),
        "tables": ((n,), np.dtype(np.uint16)),
    }
    if file.kind == "rows":
        wanted |= {"values": ((n, group.dim), dtype), "state": ((n, group.state_width), dtype)}
    if set(arrays) != set(wanted):
        raise CheckpointError(
            f"{path} must have {', '.join(wanted)}, not {', '.join(map(repr, arrays)) or 'nothing'}; {RECOVERY_HINT}"
        )
    for name, (shape, kind) in wanted.items():
        if arrays[name].shape != shape or arrays[name].dtype != kind:
            raise CheckpointError(f"{path}: {name} must be {kind} {list(shape)}; {RECOVERY_HINT}")
    tables, keys = arrays["tables"], arrays["keys"]
    if n and int(tables.max()) >= len(group.tables):
        raise CheckpointError(
            f"{path} has rows of tables that are not among the group's {len(group.tables)}; {RECOVERY_HINT}"
        )
    if not (owners_of(tables, keys, checkpoint.manifest.owners) == file.worker).all():
        raise CheckpointError(f"{path} has keys that worker {file.worker} does not own; {RECOVERY_HINT}")
    if file.kind == "removed":
        nothing = np.empty((n, 0), dtype)
        return Rows(tables, keys, nothing, nothing)
    if n and len(dedup_pairs(tables, keys)[1]) < n:
        raise CheckpointError(f"{path} has a key twice; {RECOVERY_HINT}")
    return Rows(tables, keys, arrays["values"], arrays["state"])


def count_rows(checkpoint: Checkpoint, group: int) -> int:
    """Number of rows and removed keys in the files of a group."""
    return sum(file.rows for file in checkpoint.manifest.files if file.group == group)


class DuplicateKeyCheck:
    """Raises CheckpointError if two files of one checkpoint have the same key."""

    def __init__(self, index: HashIndex | int) -> None:
        """`index`: one of exactly the keys of the files so far; or the number of keys to expect, to keep one here."""
        self._keep = isinstance(index, int)
        self._index = HashIndex(index + 1) if isinstance(index, int) else index

    def add(self, rows: Rows, checkpoint: Checkpoint, file: File) -> None:
        if (self._index.find(rows.keys, rows.tables) >= 0).any():
            raise CheckpointError(
                f"{checkpoint.path / file.name} has a key that another file of the checkpoint has too; {RECOVERY_HINT}"
            )
        if self._keep:
            self._index.insert(rows.keys, rows.tables)
