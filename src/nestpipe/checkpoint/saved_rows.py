"""What a checkpoint saves of a worker's tables: rows of each table group, then frequencies of keys without a row.

Only groups with `admit_after` have frequencies.  Writing, reading and checking treat both the same: keys with numbers.
Frequencies are integers stored in the bits of float32, as in the state of a row.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from nestpipe.checkpoint.manifest import FREQUENCIES, Group
from nestpipe.checkpoint.train_state import TrainState
from nestpipe.keys import HashIndex
from nestpipe.tables.eviction.frequency import FrequencyTable
from nestpipe.tables.group import TableGroup
from nestpipe.tables.keyed import KeyedRows
from nestpipe.tables.snapshot import Rows, Snapshot, Values


class SavedRows(Protocol):
    """Keyed rows that a checkpoint saves and restores."""

    group: Group
    """As in a manifest, without a row count."""
    index: HashIndex

    def __len__(self) -> int: ...

    def follow_changes(self) -> None: ...

    def snapshot(self, full: bool) -> Snapshot: ...

    def read(self, slots: np.ndarray) -> Values:
        """What a checkpoint saves of these slots of the index."""

    def put(self, rows: Rows) -> None:
        """Restores rows.  Their state has only the columns that a checkpoint saves."""

    def remove(self, tables: np.ndarray, keys: np.ndarray) -> None: ...


def saved_rows_of(state: TrainState) -> list[SavedRows]:
    rows: list[SavedRows] = [TableRows(store) for store in state.stores]
    waiting = [WaitingKeys(store.group, store.frequencies) for store in state.stores if store.frequencies is not None]
    return [*rows, *waiting]


class TableRows:
    """The rows of a table group."""

    def __init__(self, store: KeyedRows) -> None:
        self._store = store
        self.index = store.index
        self.group = describe(store.group)

    def __len__(self) -> int:
        return len(self._store)

    def follow_changes(self) -> None:
        self._store.follow_changes()

    def snapshot(self, full: bool) -> Snapshot:
        return self._store.snapshot(full)

    def read(self, slots: np.ndarray) -> Values:
        values, state = self._store.read(slots)
        return values, state[:, : self.group.state_width]

    def put(self, rows: Rows) -> None:
        group = self._store.group
        state = np.zeros((len(rows), group.state_width), group.dtype)
        state[:, : group.kept_width] = rows.state
        self._store.writeback(rows.tables, rows.keys, np.ascontiguousarray(rows.values), state)

    def remove(self, tables: np.ndarray, keys: np.ndarray) -> None:
        self._store.remove(tables, keys)


class WaitingKeys:
    """Frequency and last batch of keys that have no row yet."""

    def __init__(self, group: TableGroup, frequencies: FrequencyTable) -> None:
        self._frequencies = frequencies
        self.index = frequencies.index
        self.group = Group(_names(group), 2, "float32", 0, FREQUENCIES)

    def __len__(self) -> int:
        return len(self._frequencies)

    def follow_changes(self) -> None:
        self._frequencies.follow_changes()

    def snapshot(self, full: bool) -> Snapshot:
        return self._frequencies.snapshot(full)

    def read(self, slots: np.ndarray) -> Values:
        return self._frequencies.read(slots)

    def put(self, rows: Rows) -> None:
        self._frequencies.put(rows.tables, rows.keys, np.ascontiguousarray(rows.values).view(np.int32))

    def remove(self, tables: np.ndarray, keys: np.ndarray) -> None:
        self._frequencies.remove(tables, keys)


def describe(group: TableGroup) -> Group:
    """A table group as in a manifest.  Of the optimizer only the name counts: its state fits any learning rate."""
    return Group(_names(group), group.dim, group.dtype.name, group.kept_width, type(group.optimizer).__name__)


def _names(group: TableGroup) -> list[str]:
    return [table.name for table in group.tables]
