"""What every row store does with its keys, wherever the rows lie: number them, put them in order, give them first values."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from nestpipe.keys.index import Found, HashIndex
from nestpipe.keys.mixing import mix
from nestpipe.tables import kernels
from nestpipe.tables.eviction.frequency import Sightings
from nestpipe.tables.group import TableGroup
from nestpipe.tables.snapshot import Changes, Snapshot, Values


class KeyedRows(ABC):
    """Rows and optimizer state by (table, key).  `retrieve` never creates a row, `writeback` does.

    So a batch that was looked up but never trained (the run ended, a step failed) leaves no trace.
    """

    def __init__(self, group: TableGroup, seed: int, max_rows: int | None) -> None:
        self.group = group
        self.index = HashIndex(max_rows)
        self._seeds = np.array(
            [int(mix(np.uint64(t.name_hash ^ (seed & (2**64 - 1))))) for t in group.tables], np.uint64
        )
        self._normal = np.array([t.init == "normal" for t in group.tables])
        self._scales = np.array([t.init_scale for t in group.tables], np.float64)
        self._changes: Changes | None = None
        waits = group.life is not None and group.life.admit_after > 1
        self.sightings = Sightings() if waits else None
        """Of keys that have no row yet, where rows are not given to all."""

    @abstractmethod
    def retrieve(
        self,
        tables: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        state: np.ndarray,
        skip: np.ndarray | None = None,
    ) -> Found:
        """Fills values [R, D] and state [R, S] for every key; a key without a row gets its first value and zero state
        (but for its sightings, where these are counted).

        `skip`: places of keys that somebody else fills; nothing is read or written for them.  Returns where the rows of all keys
        were, for `writeback`.
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
        """Stores values and state of every key (no key twice); keys without a row get one.

        `found`: what `retrieve` of the same keys returned; without it every key is looked up once more.
        """

    @abstractmethod
    def remove(self, tables: np.ndarray, keys: np.ndarray) -> None:
        """Gives up the rows of these keys, all of which have one (no key twice).  Their slots will be used again."""

    @property
    @abstractmethod
    def life(self) -> np.ndarray:
        """[slots, 2]: sightings and last batch of every row by slot, no sightings where there is none.  Of groups with a life."""

    @abstractmethod
    def read(self, slots: np.ndarray, into: Values | None = None) -> Values:
        """Values [n, D] and state [n, S] of the given slots, as copies: new ones, or in the arrays that are given."""

    @abstractmethod
    def _copy(self, slots: np.ndarray, into: Values | None = None) -> Values:
        """As `read`, for a thread that is changing the store."""

    def _new(self, rows: int) -> Values:
        """Room for what is read."""
        widths = (self.group.dim, self.group.state_width)
        return np.empty((rows, widths[0]), self.group.dtype), np.empty((rows, widths[1]), self.group.dtype)

    def follow_changes(self) -> None:
        """From now on it is known which rows change, so that cuts can be made."""
        self._changes = Changes(self.index, self._copy)

    def _note_removal(self, tables: np.ndarray, keys: np.ndarray) -> None:
        """Before rows go: a cut may still want them."""
        if self._changes is not None:
            slots = self.index.find(keys, tables)
            self._changes.removing(tables, keys, slots[slots >= 0])

    def cut(self, full: bool) -> Snapshot:
        """The rows as they are now: all, or those that changed since the last cut.  Between two batches, when nothing is being
        written; its parts are copied from another thread while training goes on."""
        assert self._changes is not None, "follow_changes comes first"
        return self._changes.cut(self.read, full)

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of DRAM in use: rows, state and index."""

    @abstractmethod
    def overhead_per_row(self) -> float:
        """Bytes of DRAM beyond values and optimizer state, per row."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what the store holds outside DRAM; where that is something, it cannot be used after it."""

    def __len__(self) -> int:
        return len(self.index)

    def _wanted(self, slots: np.ndarray, skip: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Slots to read, -1 where there is none or it is not asked for; and the places of keys that have none."""
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
        """First values and zero state for the keys at these places; and how often they were seen, where that is known."""
        state[missing] = 0
        if len(missing):
            kernels.first_values(values, missing, keys, tables, self._seeds, self._normal, self._scales)
            if self.sightings is not None:
                self._recall(self.sightings, missing, tables, keys, state)

    def _recall(
        self, sightings: Sightings, missing: np.ndarray, tables: np.ndarray, keys: np.ndarray, state: np.ndarray
    ) -> None:
        slots = sightings.index.find(keys[missing], tables[missing])
        known, slots = missing[slots >= 0], slots[slots >= 0]
        life = sightings.life[slots]
        self.group.life_in(state)[known] = life
        if self.group.stamped:
            state[known, -1] = life[:, 1] + 1  # the stamp of that batch
