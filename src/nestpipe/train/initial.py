"""Rows that tables begin with: from files of keys and vectors that the recipe names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from nestpipe.checkpoint.vector_files import VectorsError, read_vectors
from nestpipe.keys import dedup, owners_of
from nestpipe.pipeline.pipeline import TrainPipeline


def read_initial(pipeline: TrainPipeline, files: Mapping[str, str]) -> None:
    """Every worker goes through all files, a part at a time, and keeps the rows of keys that it owns.

    Before the first step: optimizer state is zero, as that of any row before it is first trained.
    """
    known = [table.name for store in pipeline.stores for table in store.group.tables]
    for table in files:
        if table not in known:
            raise VectorsError(f"tables.initial.{table}: the model has no table {table!r}; it has {', '.join(known)}")
    for table, file in files.items():
        _read_table(pipeline, table, Path(file))


def _read_table(pipeline: TrainPipeline, table: str, path: Path) -> None:
    place, number = pipeline.place_of(table)
    store, world = pipeline.stores[place], pipeline.world
    group = store.group
    for keys, vectors in read_vectors(path, group.dim, group.dtype):
        tables = np.full(len(keys), number, np.uint16)
        mine = np.flatnonzero(owners_of(tables, keys, world.size) == world.rank)
        tables, keys, vectors = tables[mine], keys[mine], vectors[mine]
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            raise VectorsError(
                f"{path}: the vector of key {keys[bad[0]]} has NaN or infinity in it as {group.dtype}: leave the key out"
            )
        unique, where = dedup(keys)
        twice = keys[store.index.find(keys, tables) >= 0]
        if len(unique) < len(keys):
            twice = unique[np.bincount(where) > 1]
        if len(twice):
            raise VectorsError(f"{path} has key {twice[0]} more than once: leave one vector of it")
        state = np.zeros((len(keys), group.state_width), group.dtype)
        store.writeback(tables, keys, np.ascontiguousarray(vectors), state)
