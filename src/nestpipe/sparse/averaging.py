"""Averages the copies of rows that replicas hold, where they train on their own in between (`pipeline.replicas = "average"`).

Only rows that some replica has changed since the last average are exchanged: all others are equal.  Of these every replica has a
value, for a key without a row the one that it would begin with, and zero state.  Each replica adds up a part of the rows, in the
order of the groups, and sends the result to the others.  So afterwards all have the same rows with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nestpipe.comm.exchange import Exchange, Shared, Transfer
from nestpipe.keys.dedup import dedup_pairs
from nestpipe.tables.keyed import KeyedRows

CHUNK_ROWS = 1 << 16
"""Rows that are exchanged at a time, which bounds the memory that an average takes."""
FEW = 1 << 16
"""Keys are noted as they come, up to so many more than twice those that are known to be different."""


class ChangedKeys:
    """The keys of one table group that this worker's shard group has changed since the last average."""

    def __init__(self) -> None:
        self._parts: list[tuple[np.ndarray, np.ndarray]] = []
        self._noted = self._different = 0

    def note(self, tables: np.ndarray, keys: np.ndarray) -> None:
        self._parts.append((tables, keys))
        self._noted += len(keys)
        if self._noted > 2 * self._different + FEW:
            self._join()

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """Tables and keys, each once; none afterwards."""
        self._join()
        (found,), self._parts = self._parts, []
        self._noted = self._different = 0
        return found

    def _join(self) -> None:
        tables = np.concatenate([np.empty(0, np.uint16), *(t for t, _ in self._parts)])
        keys = np.concatenate([np.empty(0, np.int64), *(k for _, k in self._parts)])
        tables, keys, _ = dedup_pairs(tables, keys)
        self._parts, self._noted, self._different = [(tables, keys)], len(keys), len(keys)


class Averager:
    """One per worker.  `average` is for all workers together, while nobody else reads or changes a store."""

    def __init__(self, groups: int, exchange: Exchange) -> None:
        """`exchange`: with the replicas of this worker."""
        self.changed = [ChangedKeys() for _ in range(groups)]
        self.averages = 0
        self.rows = 0
        """Rows averaged so far, of this worker."""
        self._exchange = exchange

    def average(self, stores: Sequence[KeyedRows]) -> None:
        for changed, store in zip(self.changed, stores):
            tables, keys = self._union(*changed.take())
            for at in range(0, len(keys), CHUNK_ROWS):
                self._average(store, tables[at : at + CHUNK_ROWS], keys[at : at + CHUNK_ROWS])
            self.rows += len(keys)
        self.averages += 1

    def _union(self, tables: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What any replica has changed, each once, in an order that is the same on all."""
        size, me = self._exchange.world.size, self._exchange.world.rank
        counts = np.zeros((size, 1), np.int64)
        counts[me] = len(keys)
        self._exchange.share_rows([Shared(counts, [1] * size)])
        sizes = counts[:, 0].tolist()
        first = sum(sizes[:me])
        found = np.empty((sum(sizes), 2), np.int64)
        found[first : first + len(keys)] = np.column_stack([tables, keys])
        self._exchange.share_rows([Shared(found, sizes)])
        unique_tables, unique_keys, _ = dedup_pairs(found[:, 0].astype(np.uint16), np.ascontiguousarray(found[:, 1]))
        return unique_tables, unique_keys

    def _average(self, store: KeyedRows, tables: np.ndarray, keys: np.ndarray) -> None:
        """Values and optimizer state.  What else a row has, its stamp, stays this replica's."""
        members, count, group = self._exchange.world, len(keys), store.group
        values = np.empty((count, group.dim), group.dtype)
        state = np.empty((count, group.state_width), group.dtype)
        found = store.retrieve(tables, keys, values, state)
        width = group.optimizer_width
        rows = np.concatenate([values, state[:, :width]], axis=1)
        sizes = [count // members.size + (part < count % members.size) for part in range(members.size)]
        mine = sizes[members.rank]
        arrived = np.empty((members.size * mine, rows.shape[1]), group.dtype)
        self._exchange.exchange_rows(
            [Transfer(torch.from_numpy(rows), torch.from_numpy(arrived), sizes, [mine] * members.size)]
        )
        first = sum(sizes[: members.rank])
        total = arrived[:mine].copy()
        for part in range(1, members.size):
            total += arrived[part * mine : (part + 1) * mine]
        rows[first : first + mine] = total / group.dtype.type(members.size)
        self._exchange.share_rows([Shared(rows, sizes)])
        values[:], state[:, :width] = rows[:, : group.dim], rows[:, group.dim :]
        store.writeback(tables, keys, values, state, found)
