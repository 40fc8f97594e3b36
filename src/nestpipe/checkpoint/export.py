"""Exports one table of a checkpoint to a file of keys and vectors.  The file appears complete, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.folder import Checkpoint
from nestpipe.checkpoint.manifest import Group, Manifest, sync_directory
from nestpipe.checkpoint.merge import merged_rows, select
from nestpipe.checkpoint.plain_file import Place, plain_size
from nestpipe.checkpoint.vector_files import NumpyWriter, ParquetWriter, VectorWriter, check_suffix, files_of
from nestpipe.files import Location
from nestpipe.tables.snapshot import Rows


@dataclass(frozen=True)
class Exported:
    files: Sequence[Place]
    rows: int
    dim: int
    dtype: str

    @property
    def bytes(self) -> int:
        return sum(map(plain_size, self.files))


def export_table(
    chain: list[Checkpoint],
    table: str,
    to: Place,
    *,
    state: bool = False,
    force: bool = False,
    on_progress: Callable[[float], None] = lambda done: None,
) -> Exported:
    """Writes rows in the order of the checkpoint's files.  `on_progress` gets the fraction done."""
    suffix = check_suffix(to)
    group, number = place_of(chain[-1].manifest, table)
    described = chain[-1].manifest.groups[group]
    if state and not described.state_width:
        raise ValueError(f"--state: {described.optimizer}, the optimizer of {table!r}, has no state; leave --state out")
    rows = _rows_of(chain, group, number, on_progress)
    width = described.state_width if state else None
    if isinstance(to, Location):
        if suffix != ".parquet":
            raise ValueError(f"--to {to}: only .parquet can be written to object storage")
        count = _upload(to, described, width, rows, force)
        return Exported([to], count, described.dim, described.dtype)
    finals = files_of(to, state)
    if not to.parent.is_dir():
        raise ValueError(f"--to {to} cannot be written: no folder '{to.parent}'")
    _check_free(finals.values(), force)
    temporary = {name: path.with_name(f".{path.name}.{os.getpid()}") for name, path in finals.items()}
    dtype = np.dtype(described.dtype)
    try:
        writer: VectorWriter
        if suffix == ".parquet":
            writer = ParquetWriter(temporary["vectors"], described.dim, dtype, width)
        else:
            writer = NumpyWriter(temporary, described.dim, dtype, width, packed=suffix == ".npz")
        with writer:
            count = _write_rows(writer, rows, state)
        for path in temporary.values():
            _sync(path)
        _check_free(finals.values(), force)  # again: the export may have taken hours
        for name, path in finals.items():
            temporary[name].replace(path)
        sync_directory(to.parent)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)
    return Exported(list(finals.values()), count, described.dim, described.dtype)


def _upload(to: Location, described: Group, width: int | None, rows: Iterable[Rows], force: bool) -> int:
    """Writes the object in parts; it appears when it is complete.  Returns the number of rows."""
    _check_free([to], force)
    with to.upload() as upload:
        sink = pa.PythonFile(upload, mode="w")
        with ParquetWriter(sink, described.dim, np.dtype(described.dtype), width) as writer:
            count = _write_rows(writer, rows, width is not None)
        _check_free([to], force)
    return count


def _rows_of(chain: list[Checkpoint], group: int, number: int, on_progress: Callable[[float], None]) -> Iterable[Rows]:
    for rows in merged_rows(chain, group, on_progress):
        mine = rows.tables == number
        yield rows if mine.all() else select(rows, mine)


def _write_rows(writer: VectorWriter, parts: Iterable[Rows], state: bool) -> int:
    count = 0
    for rows in parts:
        if len(rows):
            writer.write(rows.keys, rows.values, rows.state if state else None)
            count += len(rows)
    return count


def place_of(manifest: Manifest, table: str) -> tuple[int, int]:
    """The number of the table's group, and of the table within it."""
    for number, group in enumerate(manifest.groups):
        if table in group.tables and not group.waiting:
            return number, group.tables.index(table)
    known = ", ".join(name for group in manifest.groups for name in group.tables if not group.waiting)
    raise CheckpointError(f"no table {table!r} in the checkpoint; it has {known}")


def _check_free(finals: Iterable[Place], force: bool) -> None:
    for path in finals:
        if isinstance(path, Location):
            taken = path.is_file() and not force
        else:
            taken = path.is_dir() or (path.exists() and not force)
        if taken:
            raise ValueError(f"'{path}' already exists: choose another name, or overwrite it with --force")


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
