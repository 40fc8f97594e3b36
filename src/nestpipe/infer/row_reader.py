"""Rows of a model's tables, read-only, from wherever they lie: a checkpoint's files, or an export for serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.folder import Checkpoint
from nestpipe.checkpoint.tensors import read_arrays
from nestpipe.infer.block_file import HINT, BlockFile
from nestpipe.infer.block_rows import CachedBlocks, MappedBlocks
from nestpipe.infer.checkpoint_rows import INDEX_BYTES, HeldFiles, MappedGroup, MappedRows
from nestpipe.infer.serving_files import ServingManifest, ServingTable
from nestpipe.tables.config import TableConfig
from nestpipe.tables.first_values import FirstValues


class StoredRows(Protocol):
    """The rows of one table that are stored."""

    def read(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 [k] -> values [k, dim] and which keys have a row; of the others anything.  RowReadError."""
        ...

    def nbytes(self) -> int: ...

    def close(self) -> None: ...


class Rows:
    """A `RowReader`.  Any thread.  The same bits for a key however it is asked for, and whatever was read before."""

    def __init__(self, tables: Sequence[TableConfig], seed: int, stored: Mapping[str, StoredRows]) -> None:
        """`tables`: of the model.  `seed`: of its training; a key without a row begins from it."""
        self._tables = {table.name: (number, table) for number, table in enumerate(tables)}
        self._first = FirstValues(tables, seed)
        self._stored = stored
        dims = {table.embedding_dim for table in tables}
        self.dim = dims.pop() if len(dims) == 1 else 0
        """Of all tables; 0 where they differ: ask `dim_of`."""

    @property
    def tables(self) -> list[str]:
        return list(self._tables)

    def dim_of(self, table: str) -> int:
        return self._find(table)[1].embedding_dim

    def read(self, table: str, keys: np.ndarray) -> np.ndarray:
        """Rows [k, dim] of int64 keys [k], float32 (float64 where the model's are); a copy.

        A key without a row gets the initial value that training would give it.
        """
        number, config = self._find(table)
        keys = np.asarray(keys)
        if keys.ndim != 1 or not (keys.size == 0 or np.issubdtype(keys.dtype, np.integer)):
            raise ValueError(f"rows are read by a 1-D array of integer keys, not {keys.dtype} of shape {keys.shape}")
        keys = np.ascontiguousarray(keys, np.int64)
        values, there = self._stored[table].read(keys)
        values = values.astype(np.dtype(config.dtype), copy=False)
        missing = np.flatnonzero(~there)
        if len(missing):
            self._first.fill(values, missing, keys, np.full(len(keys), number, np.uint16))
        return values

    def nbytes(self) -> int:
        """Memory that only this process can give back: indexes and caches, not the page cache."""
        return sum(rows.nbytes() for rows in self._stored.values())

    def close(self) -> None:
        for rows in self._stored.values():
            rows.close()

    def _find(self, table: str) -> tuple[int, TableConfig]:
        if table not in self._tables:
            raise ValueError(f"no table {table!r}; there are {', '.join(self._tables)}")
        return self._tables[table]


def rows_of_checkpoint(
    held: HeldFiles, chain: list[Checkpoint], tables: Sequence[TableConfig], seed: int, memory: int | None
) -> Rows:
    """Rows of a chain whose files are held.  CheckpointError if they are not the model's, or more than `memory` holds."""
    last = chain[-1]
    places = {
        name: (g, number)
        for g, group in enumerate(last.manifest.groups)
        if not group.waiting
        for number, name in enumerate(group.tables)
    }
    described = {name: last.manifest.groups[g] for name, (g, _) in places.items()}
    for table in tables:
        _check_table(table, str(last.path), *_kind_of(described.get(table.name)))
    wanted = sorted({places[table.name][0] for table in tables})
    if memory is not None:
        needed = sum(
            group.rows * (INDEX_BYTES + group.dim * np.dtype(group.dtype).itemsize)
            for group in (last.manifest.groups[g] for g in wanted)
        )
        if needed > memory:
            raise CheckpointError(
                f"{last.path}: its rows need {needed / 1e6:,.1f} MB of memory, more than {memory / 1e6:,.1f}: "
                "`nestpipe checkpoint export RUN --for-serving --to DIR` writes what is read from disk; open that"
            )
    groups = {g: MappedGroup(held, chain, g) for g in wanted}
    return Rows(tables, seed, {t.name: MappedRows(groups[g], n) for t in tables for g, n in [places[t.name]]})


def rows_of_export(
    directory: Path, manifest: ServingManifest, tables: Sequence[TableConfig], seed: int, memory: int | None
) -> Rows:
    """Rows of an export.  `memory`: bytes for rows read from disk; None: memory-mapped, through the page cache."""
    found = {table.name: table for table in manifest.tables}
    for table in tables:
        _check_table(table, str(directory), *_kind_of(found.get(table.name)))
    used = [found[table.name] for table in tables]
    total = sum(table.bytes for table in used) or 1
    stored: dict[str, StoredRows] = {}
    for one in used:
        # By size: a table that is read as often as it is large has the same share of hits as any other.
        share = None if memory is None else memory * one.bytes // total
        stored[one.name] = open_table(directory, one, share)
    return Rows(tables, seed, stored)


def open_table(directory: Path, table: ServingTable, memory: int | None) -> StoredRows:
    path = directory / table.fences.name
    arrays = read_arrays(path, table.fences)
    layout = table.layout
    fences = arrays.get("fences")
    if fences is None or fences.dtype != np.int64 or fences.shape != (layout.blocks_of(table.rows),):
        raise CheckpointError(f"{path} must have one fence for each block and nothing else; {HINT}")
    fences = fences.view(np.uint64)
    if len(fences) > 1 and not (fences[1:] > fences[:-1]).all():
        raise CheckpointError(f"{path}: its fences are not in ascending order; {HINT}")
    if memory is not None and memory < fences.nbytes and table.rows:
        raise CheckpointError(
            f"{path}: the index of table {table.name!r} needs {fences.nbytes / 1e6:,.1f} MB, and its share of memory is "
            f"{memory / 1e6:,.1f}: give more memory"
        )
    file = BlockFile(directory / table.file, layout, table.rows, table.salt, direct=memory is not None)
    if memory is None:
        return MappedBlocks(file, fences, table.rows)
    return CachedBlocks(file, fences, table.rows, memory)


def _kind_of(group: object) -> tuple[int | None, str | None]:
    return getattr(group, "dim", None), getattr(group, "dtype", None)


def _check_table(table: TableConfig, where: str, dim: int | None, dtype: str | None) -> None:
    if dim is None:
        raise CheckpointError(f"{where} has no table {table.name!r}: it belongs to another model")
    if (dim, dtype) != (table.embedding_dim, table.dtype):
        raise CheckpointError(
            f"{where}: rows of table {table.name!r} are {dim} {dtype}, and {table.embedding_dim} {table.dtype} in the "
            "model: it belongs to another model"
        )
