"""What a checkpoint keeps of a worker's tables, as one list: the rows of each table group, then what is known of keys that wait
for a row, where a group has such.

To all that writes, reads and checks files both are the same: keys with numbers.  Sightings are whole numbers in the bits of
float32, as they are in the state of a row.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from nestpipe.checkpoint.manifest import SIGHTINGS, Group
from nestpipe.keys import HashIndex
from nestpipe.pipeline.pipeline import TrainPipeline
from nestpipe.tables.eviction.frequency import FrequencyTable
from nestpipe.tables.group import TableGroup
from nestpipe.tables.keyed import KeyedRows
from nestpipe.tables.snapshot import Rows, Snapshot


class Kept(Protocol):
    group: Group
    """As a manifest names it, without a count."""
    index: HashIndex

    def __len__(self) -> int: ...

    def follow_changes(self) -> None: ...

    def cut(self, full: bool) -> Snapshot: ...

    def put(self, rows: Rows) -> None:
        """As they were kept: state without what is not kept."""

    def remove(self, tables: np.ndarray, keys: np.ndarray) -> None: ...


def kept_of(pipeline: TrainPipeline) -> list[Kept]:
    rows: list[Kept] = [KeptRows(store) for store in pipeline.stores]
    waiting = [
        KeptSightings(store.group, store.frequencies) for store in pipeline.stores if store.frequencies is not None
    ]
    return [*rows, *waiting]


class KeptRows:
    def __init__(self, store: KeyedRows) -> None:
        self._store = store
        self.index = store.index
        self.group = describe(store.group)

    def __len__(self) -> int:
        return len(self._store)

    def follow_changes(self) -> None:
        self._store.follow_changes()

    def cut(self, full: bool) -> Snapshot:
        return self._store.snapshot(full)

    def put(self, rows: Rows) -> None:
        group = self._store.group
        state = np.zeros((len(rows), group.state_width), group.dtype)
        state[:, : group.kept_width] = rows.state
        self._store.writeback(rows.tables, rows.keys, np.ascontiguousarray(rows.values), state)

    def remove(self, tables: np.ndarray, keys: np.ndarray) -> None:
        self._store.remove(tables, keys)


class KeptSightings:
    def __init__(self, group: TableGroup, sightings: FrequencyTable) -> None:
        self._sightings = sightings
        self.index = sightings.index
        self.group = Group(_names(group), 2, "float32", 0, SIGHTINGS)

    def __len__(self) -> int:
        return len(self._sightings)

    def follow_changes(self) -> None:
        self._sightings.follow_changes()

    def cut(self, full: bool) -> Snapshot:
        return self._sightings.snapshot(full)

    def put(self, rows: Rows) -> None:
        self._sightings.put(rows.tables, rows.keys, np.ascontiguousarray(rows.values).view(np.int32))

    def remove(self, tables: np.ndarray, keys: np.ndarray) -> None:
        self._sightings.remove(tables, keys)


def describe(group: TableGroup) -> Group:
    """The rows of a table group, as a manifest names them.  Of the optimizer its name: its state fits whatever its rates are."""
    return Group(_names(group), group.dim, group.dtype.name, group.kept_width, type(group.optimizer).__name__)


def _names(group: TableGroup) -> list[str]:
    return [table.name for table in group.tables]
