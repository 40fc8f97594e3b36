"""The row store of one worker's shard of a table group, in DRAM."""

from __future__ import annotations

import numpy as np

from nestpipe.keys.index import HashIndex
from nestpipe.keys.mixing import mix
from nestpipe.keys.slab import Slab, machine_bytes
from nestpipe.tables import kernels
from nestpipe.tables.group import TableGroup


class RowStore:
    """Rows and optimizer state by (table, key).  `retrieve` never creates a row, `writeback` does.

    So a batch that was looked up but never trained (the run ended, a step failed) leaves no trace.
    """

    def __init__(self, group: TableGroup, seed: int) -> None:
        self.group = group
        row_bytes = (group.dim + group.state_width) * group.dtype.itemsize
        max_rows = machine_bytes() // max(row_bytes, 8)
        self.index = HashIndex(max_rows)
        self.values = Slab(group.dtype, (group.dim,), max_rows)
        self.state = Slab(group.dtype, (group.state_width,), max_rows)
        self._seeds = np.array(
            [int(mix(np.uint64(t.name_hash ^ (seed & (2**64 - 1))))) for t in group.tables], np.uint64
        )
        self._normal = np.array([t.init == "normal" for t in group.tables])
        self._scales = np.array([t.init_scale for t in group.tables], np.float64)

    def __len__(self) -> int:
        return len(self.index)

    def retrieve(self, tables: np.ndarray, keys: np.ndarray, values: np.ndarray, state: np.ndarray) -> None:
        """Fills values [R, D] and state [R, S] for every key; a key without a row gets its first value and zero state."""
        slots = self.index.find(keys, tables)
        kernels.gather(self.values.rows, slots, values)
        missing = np.flatnonzero(slots < 0)
        if state.shape[1]:
            kernels.gather(self.state.rows, slots, state)
            state[missing] = 0
        if len(missing):
            kernels.first_values(values, missing, keys, tables, self._seeds, self._normal, self._scales)

    def writeback(self, tables: np.ndarray, keys: np.ndarray, values: np.ndarray, state: np.ndarray) -> None:
        """Stores values and state of every key (no key twice); keys without a row get one."""
        slots = self.index.insert(keys, tables)
        self.values.reserve(self.index.slots_used)
        kernels.scatter(values, slots, self.values.rows)
        if state.shape[1]:
            kernels.scatter(state, slots, self.state.rows)

    def rows_of(self, table: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys of one table, ascending, and their slots."""
        tables, keys, slots = self.index.items()
        mine = np.flatnonzero(tables == table)
        order = mine[np.argsort(keys[mine])]
        return keys[order], slots[order]

    def read(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values [n, D] and state [n, S] of the given slots, as copies."""
        return self.values.rows[slots], self.state.rows[slots]

    def nbytes(self) -> int:
        """Bytes in use: rows, state and index."""
        used = self.index.slots_used
        width = self.group.dim + self.group.state_width
        return used * width * self.group.dtype.itemsize + self.index.nbytes()

    def overhead_per_row(self) -> float:
        """Bytes beyond values and optimizer state, per row."""
        return self.index.nbytes() / max(1, len(self))
