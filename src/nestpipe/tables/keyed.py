"""What all row stores share, wherever the rows are: the key index, key order and first values."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from nestpipe.keys.index import Found, HashIndex
from nestpipe.tables.eviction.frequency import FrequencyTable
from nestpipe.tables.first_values import FirstValues
from nestpipe.tables.group import TableGroup
from nestpipe.tables.snapshot import Changes, Snapshot, Values


class KeyedRows(ABC):
    """Rows and optimizer state by (table, key).  `retrieve` never creates a row, `writeback` does.

    So a batch that was looked up but never trained (the run ended, a step failed) leaves no trace.
    """

    def __init__(self, group: TableGroup, seed: int, max_rows: int | None) -> None:
        self.group = group
        self.index = HashIndex(max_rows)
        self._first = FirstValues(group.tables, seed)
        self._changes: Changes | None = None
        waits = group.eviction is not None and group.eviction.admit_after > 1
        self.frequencies = FrequencyTable() if waits else None
        """Usage of keys that have no row yet; None where every key gets a row at once."""

    @abstractmethod
    def retrieve(
        self,
        tables: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        state: np.ndarray,
        skip: np.ndarray | None = None,
    ) -> Found:
        """Fills values [R, D] and state [R, S] for every key.  Returns where the rows were, for `writeback`.

        A key without a row gets its first value and zero state, except for its usage where that is counted.  `skip`:
        places of keys that the caller fills from elsewhere; nothing is read or written for them.
        """

    @abstractmethod
    def writeback(
        self,
        tables: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        state: np.ndarray,
        found: Found | None = None,
    ) -> None:
        """Stores values and state of every key (no key twice).  Keys without a row get one.

        `found`: the result of `retrieve` for the same keys; without it every key is looked up again.
        """

    @abstractmethod
    def remove(self, tables: np.ndarray, keys: np.ndarray) -> None:
        """Removes the rows of these keys (no key twice); each must have one.  Their slots are reused."""

    @property
    @abstractmethod
    def usage(self) -> np.ndarray:
        """[slots, 2]: frequency and last batch of every row by slot; frequency 0 in an empty slot.  Needs a policy."""

    @abstractmethod
    def read(self, slots: np.ndarray, into: Values | None = None) -> Values:
        """Copies of the values [n, D] and state [n, S] of the given slots, in `into` if given, else in new arrays."""

    @abstractmethod
    def _copy(self, slots: np.ndarray, into: Values | None = None) -> Values:
        """As `read`, for the thread that is changing the store."""

    def _new(self, rows: int) -> Values:
        """Arrays to read into."""
        widths = (self.group.dim, self.group.state_width)
        return np.empty((rows, widths[0]), self.group.dtype), np.empty((rows, widths[1]), self.group.dtype)

    def follow_changes(self) -> None:
        """Starts to track which rows change.  Required before `snapshot`."""
        self._changes = Changes(self.index, self._copy)

    def _before_remove(self, tables: np.ndarray, keys: np.ndarray) -> None:
        """Saves rows for a snapshot that has not copied them yet."""
        if self._changes is not None:
            slots = self.index.find(keys, tables)
            self._changes.before_remove(tables, keys, slots[slots >= 0])

    def snapshot(self, full: bool) -> Snapshot:
        """A snapshot of all rows, or of those that changed since the last one.

        Call it between two batches, when nothing is being written.  Another thread then copies it while training
        continues.
        """
        assert self._changes is not None, "call follow_changes first"
        return self._changes.snapshot(self.read, full)

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of DRAM in use: rows, state and index."""

    @abstractmethod
    def overhead_per_row(self) -> float:
        """Bytes of DRAM per row beyond values and optimizer state."""

    @abstractmethod
    def close(self) -> None:
        """Releases what the store holds outside DRAM.  A store that holds anything there cannot be used afterwards."""

    def __len__(self) -> int:
        return len(self.index)

    def _wanted(self, slots: np.ndarray, skip: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Slots to read, with -1 for keys without a row and for skipped ones; and the places of keys without a row."""
        if skip is None or not len(skip):
            return slots, np.flatnonzero(slots < 0)
        wanted = slots.copy()
        wanted[skip] = 0
        missing = np.flatnonzero(wanted < 0)
        wanted[skip] = -1
        return wanted, missing

    def rows_of(self, table: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys of one table, ascending, and their slots."""
        tables, keys, slots = self.index.items()
        mine = np.flatnonzero(tables == table)
        order = mine[np.argsort(keys[mine])]
        return keys[order], slots[order]

    def begin(
        self, missing: np.ndarray, tables: np.ndarray, keys: np.ndarray, values: np.ndarray, state: np.ndarray
    ) -> None:
        """Gives the keys at these places their first values and zero state, and their usage where it is known."""
        state[missing] = 0
        if len(missing):
            self._first.fill(values, missing, keys, tables)
            if self.frequencies is not None:
                self._recall(self.frequencies, missing, tables, keys, state)

    def _recall(
        self, frequencies: FrequencyTable, missing: np.ndarray, tables: np.ndarray, keys: np.ndarray, state: np.ndarray
    ) -> None:
        slots = frequencies.index.find(keys[missing], tables[missing])
        known, slots = missing[slots >= 0], slots[slots >= 0]
        usage = frequencies.usage[slots]
        self.group.eviction_columns(state)[known] = usage
        if self.group.stamped:
            state[known, -1] = usage[:, 1] + 1  # the stamp of the last batch
