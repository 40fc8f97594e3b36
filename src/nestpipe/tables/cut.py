"""A store's rows as they were at one moment, copied while training goes on.

Every slot has a byte of flags.  A row that training is about to change, and that a cut has still to copy, is set aside first; all
others are copied in parts from another thread.  So a cut costs training the rows that it changes meanwhile and nothing else, and
holds no more memory than those and one part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numba
import numpy as np

from nestpipe.keys.index import HashIndex
from nestpipe.keys.native import prefetch_to_write
from nestpipe.keys.slab import Slab

TOUCHED, PENDING, COPYING = np.uint8(1), np.uint8(2), np.uint8(4)
"""Changed since the last cut; a cut has still to copy it; being copied, which counts only if nobody changes it meanwhile."""
_AHEAD = 16

Values = tuple[np.ndarray, np.ndarray]
"""Values [n, D] and state [n, S]."""


@numba.njit(nogil=True, cache=True)
def _note_changes(flags, slots, early):  # type: ignore[no-untyped-def]
    """All are touched.  Those that a cut still has to copy go to `early`; returns how many."""
    count = 0
    for i in range(slots.shape[0]):
        if i + _AHEAD < slots.shape[0]:
            prefetch_to_write(flags, np.uint64(slots[i + _AHEAD]))
        if flags[slots[i]] & (PENDING | COPYING):
            early[count] = slots[i]
            count += 1
        flags[slots[i]] = TOUCHED
    return count


@numba.njit(nogil=True, cache=True)
def _begin(flags, used):  # type: ignore[no-untyped-def]
    """What was touched is to be copied; returns how many."""
    count = 0
    for slot in range(used):
        if flags[slot] & TOUCHED:
            flags[slot] = PENDING
            count += 1
    return count


@numba.njit(nogil=True, cache=True)
def _take(flags, at, used, slots):  # type: ignore[no-untyped-def]
    """The next slots to copy, from `at` on; returns how many, and where to go on."""
    count = 0
    while at < used and count < slots.shape[0]:
        if flags[at] & PENDING:
            flags[at] = flags[at] & ~PENDING | COPYING
            slots[count] = at
            count += 1
        at += 1
    return count, at


@numba.njit(nogil=True, cache=True)
def _keep_unchanged(flags, slots, places):  # type: ignore[no-untyped-def]
    """Places in `slots` of those that nobody has changed while they were copied; returns how many."""
    count = 0
    for i in range(slots.shape[0]):
        if flags[slots[i]] & COPYING:
            flags[slots[i]] = flags[slots[i]] & ~COPYING
            places[count] = i
            count += 1
    return count


@dataclass(frozen=True)
class Rows:
    """Some rows of a table group, by value."""

    tables: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    state: np.ndarray

    def __len__(self) -> int:
        return len(self.keys)


class Changes:
    """Which rows of a store have changed since the last cut.  `changing` and `removing` are called by whoever changes the store,
    before it does and one at a time; `cut` between two batches, when nobody changes anything.
    """

    def __init__(self, index: HashIndex, copy: Callable[[np.ndarray], Values]) -> None:
        """`copy`: values and state of slots, called from within `changing`."""
        self.index = index
        self._copy = copy
        self.flags = Slab(np.uint8, ())
        self._removed: list[tuple[np.ndarray, np.ndarray]] = []
        self._cut: Cut | None = None
        self.lock = threading.Lock()

    def changing(self, slots: np.ndarray) -> None:
        """These rows are about to be changed, or born."""
        early = np.empty(len(slots), np.int64)
        with self.lock:
            count = _note_changes(self.flags.rows, slots, early)
            if count:
                assert self._cut is not None, "rows are pending and there is no cut"
                self._cut.set_aside(self._rows_at(early[:count]))

    def removing(self, tables: np.ndarray, keys: np.ndarray, slots: np.ndarray) -> None:
        """These rows, of these keys, are about to go."""
        self.changing(slots)
        with self.lock:
            self.flags.rows[slots] = 0
            self._removed.append((tables.copy(), keys.copy()))

    def cut(self, read: Callable[[np.ndarray], Values], full: bool) -> Cut:
        """All rows as they are now, or those that changed since the last cut.  `read`: values and state of slots, any thread."""
        assert self._cut is None or self._cut.over, "one cut at a time"
        used = self.index.slots_used
        flags = self.flags.rows
        with self.lock:
            if full:
                flags[:used] = PENDING
                flags[self.index.free_slots()] = 0
                count = len(self.index)
            else:
                count = _begin(flags, used)
            removed, self._removed = self._removed, []
            self._cut = Cut(self, read, used, count, [] if full else removed)
        return self._cut

    def rows_at(self, slots: np.ndarray, read: Callable[[np.ndarray], Values]) -> Rows:
        return Rows(self.index.slot_tables.rows[slots], self.index.slot_keys.rows[slots], *read(slots))

    def _rows_at(self, slots: np.ndarray) -> Rows:
        return self.rows_at(slots, self._copy)


class Cut:
    """The rows of one moment.  One thread, any, goes through `parts` once, to the end."""

    def __init__(
        self,
        changes: Changes,
        read: Callable[[np.ndarray], Values],
        used: int,
        count: int,
        removed: list[tuple[np.ndarray, np.ndarray]],
    ) -> None:
        self._changes = changes
        self._read = read
        self._used = used
        self.count = count
        """Rows that it has."""
        nothing = (np.empty(0, np.uint16), np.empty(0, np.int64))
        self.removed_tables, self.removed_keys = (np.concatenate(parts) for parts in zip(nothing, *removed))
        """Keys that went since the last cut; some may have come back since and are among the rows."""
        self._aside: list[Rows] = []
        self.over = False

    def set_aside(self, rows: Rows) -> None:
        self._aside.append(rows)

    def parts(self, most: int) -> Iterator[Rows]:
        """All rows, some at a time: at most `most`, or as many as a batch has changed at once."""
        at, given = 0, 0
        slots = np.empty(most, np.int64)
        flags, lock = self._changes.flags.rows, self._changes.lock
        while at < self._used:
            with lock:
                count, at = _take(flags, at, self._used, slots)
            rows = self._changes.rows_at(slots[:count], self._read)
            with lock:
                places = np.empty(count, np.int64)
                kept = places[: _keep_unchanged(flags, slots[:count], places)]
                aside, self._aside = self._aside, []
            if len(kept) < count:
                rows = Rows(rows.tables[kept], rows.keys[kept], rows.values[kept], rows.state[kept])
            for part in (rows, *aside):
                if len(part):
                    given += len(part)
                    yield part
        with lock:
            aside, self._aside, self.over = self._aside, [], True
        for part in aside:
            given += len(part)
            yield part
        assert given == self.count, f"{given} rows copied of {self.count}"

    def abandon(self) -> None:
        """Nobody will go on with it: training no longer sets rows aside."""
        with self._changes.lock:
            flags = self._changes.flags.rows[: self._used]
            np.bitwise_and(flags, TOUCHED, out=flags)
            self._aside, self.over = [], True
