"""How often keys that have no row yet were seen: two small numbers a key, some 30 bytes with its place in the index."""

from __future__ import annotations

import numpy as np

from nestpipe.keys.index import HashIndex
from nestpipe.keys.slab import Slab
from nestpipe.tables.snapshot import Changes, Snapshot, Values


class Sightings:
    """(sightings, last batch) by (table, key), of keys that wait for admission.  A key with a row has its own beside it."""

    def __init__(self) -> None:
        self.index = HashIndex()
        self._counts = Slab(np.int32, (2,))
        self._changes: Changes | None = None

    def __len__(self) -> int:
        return len(self.index)

    @property
    def life(self) -> np.ndarray:
        """[slots, 2]: (sightings, last batch) by slot of the index; no sightings where nobody is."""
        return self._counts.rows

    def put(self, tables: np.ndarray, keys: np.ndarray, life: np.ndarray) -> None:
        slots = self.index.insert(keys, tables)
        if self._changes is not None:
            self._changes.changing(slots)
        self._counts.rows[slots] = life

    def remove(self, tables: np.ndarray, keys: np.ndarray) -> None:
        if len(keys) and len(self):
            if self._changes is not None:
                slots = self.index.find(keys, tables)
                there = slots >= 0
                self._changes.removing(tables[there], keys[there], slots[there])
            self._counts.rows[self.index.delete(keys, tables)] = 0

    def rows_of(self, table: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys of one table, ascending, and their slots."""
        tables, keys, slots = self.index.items()
        mine = np.flatnonzero(tables == table)
        order = mine[np.argsort(keys[mine])]
        return keys[order], slots[order]

    def read(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(sightings, last batch) [n, 2] of the given slots, and nothing [n, 0], as a store of rows has state."""
        return self._counts.rows[slots].astype(np.int64), np.empty((len(slots), 0), np.int64)

    def follow_changes(self) -> None:
        """As a store of rows: from now on cuts can be made."""
        self._changes = Changes(self.index, self._copy)

    def cut(self, full: bool) -> Snapshot:
        """As of a store of rows, with (sightings, last batch) [n, 2] in the bits of float32 as values, and no state."""
        assert self._changes is not None, "follow_changes comes first"
        return self._changes.cut(self._copy, full)

    def _copy(self, slots: np.ndarray, into: Values | None = None) -> Values:
        counts = self._counts.rows[slots].view(np.float32), np.empty((len(slots), 0), np.float32)
        if into is None:
            return counts
        into[0][:] = counts[0]
        return into

    def nbytes(self) -> int:
        return self.index.nbytes() + 8 * self.index.slots_used
