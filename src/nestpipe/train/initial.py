"""Initial rows of tables, from files of keys and vectors that the recipe names."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nestpipe.checkpoint.places import place_at
from nestpipe.checkpoint.plain_file import Place
from nestpipe.checkpoint.replicas import topology_of
from nestpipe.checkpoint.train_state import TrainState
from nestpipe.checkpoint.vector_files import VectorsError, read_vectors
from nestpipe.comm.topology import ShardGroup
from nestpipe.keys import dedup
from nestpipe.tables.keyed import KeyedRows


def read_initial(state: TrainState, files: Mapping[str, str]) -> None:
    """Fills tables from files, before the first step.  Optimizer state starts at zero, as for any new row.

    Every worker reads all files, in parts, and keeps the rows of keys that it owns.
    """
    places = {table.name: (store, number) for store in state.stores for number, table in enumerate(store.group.tables)}
    for table in files:
        if table not in places:
            raise VectorsError(f"tables.initial.{table}: the model has no table {table!r}; it has {', '.join(places)}")
    for table, file in files.items():
        _read_table(topology_of(state).shard, *places[table], place_at(file))


def _read_table(shard: ShardGroup, store: KeyedRows, number: int, path: Place) -> None:
    group = store.group
    for keys, vectors in read_vectors(path, group.dim, group.dtype):
        tables = np.full(len(keys), number, np.uint16)
        mine = np.flatnonzero(shard.owns(tables, keys))
        tables, keys, vectors = tables[mine], keys[mine], vectors[mine]
        bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
        if len(bad):
            raise VectorsError(
                f"{path}: the vector of key {keys[bad[0]]} has NaN or infinity as {group.dtype}: remove it"
            )
        unique, where = dedup(keys)
        twice = keys[store.index.find(keys, tables) >= 0]
        if len(unique) < len(keys):
            twice = unique[np.bincount(where) > 1]
        if len(twice):
            raise VectorsError(f"{path} has key {twice[0]} more than once: keep one vector of it")
        state = np.zeros((len(keys), group.state_width), group.dtype)
        store.writeback(tables, keys, np.ascontiguousarray(vectors), state)
