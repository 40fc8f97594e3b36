"""Frequencies of keys that have no row yet: two small numbers per key, some 30 bytes with its index entry."""

from __future__ import annotations

import numpy as np

from nestpipe.keys.index import HashIndex
from nestpipe.keys.slab import Slab
from nestpipe.tables.snapshot import Changes, Snapshot, Values


class FrequencyTable:
    """Usage (frequency, last batch) by (table, key) of keys that wait for admission.

    A key that has a row keeps its usage in the row's state instead.  Checkpoints store this table under the old name
    `sightings`.
    """

    def __init__(self) -> None:
        self.index = HashIndex()
        self._usage = Slab(np.int32, (2,))
        self._changes: Changes | None = None

    def __len__(self) -> int:
        return len(self.index)

    @property
    def usage(self) -> np.ndarray:
        """[slots, 2]: (frequency, last batch) by slot of the index.  An empty slot has frequency 0."""
        return self._usage.rows

    def put(self, tables: np.ndarray, keys: np.ndarray, usage: np.ndarray) -> None:
        slots = self.index.insert(keys, tables)
        if self._changes is not None:
            self._changes.before_write(slots)
        self._usage.rows[slots] = usage

    def remove(self, tables: np.ndarray, keys: np.ndarray) -> None:
        """Removes the given keys; keys that are not there are ignored."""
        if len(keys) and len(self):
            if self._changes is not None:
                slots = self.index.find(keys, tables)
                there = slots >= 0
                self._changes.before_remove(tables[there], keys[there], slots[there])
            self._usage.rows[self.index.delete(keys, tables)] = 0

    def rows_of(self, table: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys of one table, ascending, and their slots."""
        tables, keys, slots = self.index.items()
        mine = np.flatnonzero(tables == table)
        order = mine[np.argsort(keys[mine])]
        return keys[order], slots[order]

    def read(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Usage [n, 2] of the given slots, and an empty array [n, 0] in place of a row store's state."""
        return self._usage.rows[slots].astype(np.int64), np.empty((len(slots), 0), np.int64)

    def follow_changes(self) -> None:
        """Starts to track changes, as a row store does.  Required before `snapshot`."""
        self._changes = Changes(self.index, self._copy)

    def snapshot(self, full: bool) -> Snapshot:
        """As a row store's.  Values are the usage [n, 2] in the bits of float32; there is no state."""
        assert self._changes is not None, "call follow_changes first"
        return self._changes.snapshot(self._copy, full)

    def _copy(self, slots: np.ndarray, into: Values | None = None) -> Values:
        copies = self._usage.rows[slots].view(np.float32), np.empty((len(slots), 0), np.float32)
        if into is None:
            return copies
        into[0][:] = copies[0]
        return into

    def nbytes(self) -> int:
        return self.index.nbytes() + 8 * self.index.slots_used
