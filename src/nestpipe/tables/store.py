"""The row store of one worker's shard of a table group, in DRAM; and the choice between stores."""

from __future__ import annotations

import numpy as np

from nestpipe.keys.index import Found
from nestpipe.keys.slab import Slab, machine_bytes
from nestpipe.ops import rows_kernels as kernels
from nestpipe.tables.disk.tiered_store import DiskTier, TieredRowStore
from nestpipe.tables.group import TableGroup
from nestpipe.tables.keyed import KeyedRows
from nestpipe.tables.snapshot import Values


def make_store(group: TableGroup, seed: int, rank: int, tier: DiskTier | None) -> KeyedRows:
    """The store of a worker's shard of a group: in DRAM, or with a disk tier.  Both give the same bits."""
    return RowStore(group, seed) if tier is None else TieredRowStore(group, seed, rank, tier)


class RowStore(KeyedRows):
    """All rows in DRAM."""

    def __init__(self, group: TableGroup, seed: int) -> None:
        row_bytes = (group.dim + group.state_width) * group.dtype.itemsize
        max_rows = machine_bytes() // max(row_bytes, 8)
        super().__init__(group, seed, max_rows)
        self.values = Slab(group.dtype, (group.dim,), max_rows)
        self.state = Slab(group.dtype, (group.state_width,), max_rows)

    def retrieve(
        self,
        tables: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        state: np.ndarray,
        skip: np.ndarray | None = None,
    ) -> Found:
        found = self.index.look(keys, tables)
        slots, missing = self._wanted(found.slots, skip)
        kernels.gather(self.values.rows, slots, values)
        if state.shape[1]:
            kernels.gather(self.state.rows, slots, state)
        self.begin(missing, tables, keys, values, state)
        return found

    def writeback(
        self,
        tables: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        state: np.ndarray,
        found: Found | None = None,
    ) -> None:
        slots = self.index.settle(keys, tables, found)
        self.values.reserve(self.index.slots_used)
        if self._changes is not None:
            self._changes.before_write(slots)
        kernels.scatter(values, slots, self.values.rows)
        if state.shape[1]:
            kernels.scatter(state, slots, self.state.rows)

    def remove(self, tables: np.ndarray, keys: np.ndarray) -> None:
        self._before_remove(tables, keys)
        slots = self.index.delete(keys, tables)
        self.state.rows[slots] = 0  # frequency 0 tells a sweep that the slot is empty

    @property
    def usage(self) -> np.ndarray:
        return self.group.eviction_columns(self.state.rows)

    def read(self, slots: np.ndarray, into: Values | None = None) -> Values:
        values, state = into or self._new(len(slots))
        kernels.gather(self.values.rows, slots, values)  # without the GIL
        if state.shape[1]:
            kernels.gather(self.state.rows, slots, state)
        return values, state

    _copy = read

    def nbytes(self) -> int:
        used = self.index.slots_used
        width = self.group.dim + self.group.state_width
        rows = used * width * self.group.dtype.itemsize
        return rows + self.index.nbytes() + (self.frequencies.nbytes() if self.frequencies is not None else 0)

    def overhead_per_row(self) -> float:
        return self.index.nbytes() / max(1, len(self))

    def close(self) -> None:
        """Does nothing: the memory is freed with the object."""
