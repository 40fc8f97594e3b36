"""A store's rows as they were at one moment, copied while training goes on.

Every slot has a byte of flags.  A row that training is about to change, and that a cut has still to copy, is set aside first; all
others are copied in parts from another thread.  So a cut costs training the rows that it changes meanwhile and nothing else, and
holds no more memory than those and what it is given to copy into.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numba
import numpy as np

from nestpipe.keys.index import HashIndex
from nestpipe.keys.prefetch import prefetch
from nestpipe.keys.slab import Slab

TOUCHED, PENDING, COPYING = np.uint8(1), np.uint8(2), np.uint8(4)
"""Changed since the last cut; a cut has still to copy it; being copied, which counts only if nobody changes it meanwhile."""
_AHEAD = 16

Values = tuple[np.ndarray, np.ndarray]
"""Values [n, D] and state [n, S]."""


class Read(Protocol):
    """Values and state of slots, as copies: new ones, or in the arrays that are given."""

    def __call__(self, slots: np.ndarray, into: Values | None = None) -> Values: ...


@numba.njit(nogil=True, cache=True)
def _note_changes(flags, slots, early):  # type: ignore[no-untyped-def]
    """All are touched.  Those that a cut still has to copy go to `early`; returns how many."""
    count = 0
    for i in range(slots.shape[0]):
        if i + _AHEAD < slots.shape[0]:
            prefetch(flags, np.uint64(slots[i + _AHEAD]))
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


@numba.njit(nogil=True, cache=True)
def _close_gaps(places, tables, keys, values, state):  # type: ignore[no-untyped-def]
    """Rows at `places`, which ascend, become the first ones."""
    for i in range(places.shape[0]):
        place = places[i]
        if place != i:
            tables[i] = tables[place]
            keys[i] = keys[place]
            for d in range(values.shape[1]):
                values[i, d] = values[place, d]
            for d in range(state.shape[1]):
                state[i, d] = state[place, d]


@dataclass(frozen=True)
class Rows:
    """Some rows of a table group, by value."""

    tables: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    state: np.ndarray

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, which: slice) -> Rows:
        return Rows(self.tables[which], self.keys[which], self.values[which], self.state[which])


class _Room:
    """Memory as columns of rows, filled from the front.  It is used again and again: fresh memory would cost more than all the
    copying (docs/log.md)."""

    def __init__(self, memory: np.ndarray, values: np.ndarray, state: np.ndarray) -> None:
        """`values` and `state`: of no rows, for their widths and types."""
        columns = [
            (np.dtype(np.int64), ()),
            *((a.dtype, a.shape[1:]) for a in (values, state)),
            (np.dtype(np.uint16), ()),
        ]
        widths = [kind.itemsize * int(np.prod(shape)) for kind, shape in columns]
        self.capacity = len(memory) // sum(widths)
        assert self.capacity, "no room for a single row"
        made, at = [], 0
        for (kind, shape), width in zip(columns, widths):
            made.append(memory[at : at + self.capacity * width].view(kind).reshape(self.capacity, *shape))
            at += self.capacity * width
        self._all = Rows(made[3], made[0], made[1], made[2])
        self.filled = 0

    @property
    def rows(self) -> Rows:
        return self._all[: self.filled]

    def free(self, most: int) -> Rows:
        """What may be filled next."""
        return self._all[self.filled : min(self.filled + most, self.capacity)]

    def add(self, rows: Rows) -> Rows:
        """Copies as many as there is room for; returns the others."""
        target = self.free(len(rows))
        count = len(target)
        target.tables[:], target.keys[:] = rows.tables[:count], rows.keys[:count]
        target.values[:], target.state[:] = rows.values[:count], rows.state[:count]
        self.filled += count
        return rows[count:]


class Changes:
    """Which rows of a store have changed since the last cut.  `changing` and `removing` are called by whoever changes the store,
    before it does and one at a time; `cut` between two batches, when nobody changes anything.
    """

    def __init__(self, index: HashIndex, copy: Read) -> None:
        """`copy`: values and state of slots, called from within `changing`."""
        self.index = index
        self._copy = copy
        self.flags = Slab(np.uint8, ())
        self._removed: list[tuple[np.ndarray, np.ndarray]] = []
        self._cut: Snapshot | None = None
        self.lock = threading.Lock()

    def changing(self, slots: np.ndarray) -> None:
        """These rows are about to be changed, or born."""
        early = np.empty(len(slots), np.int64)
        with self.lock:
            count = _note_changes(self.flags.rows, slots, early)
            if count:
                assert self._cut is not None, "rows are pending and there is no cut"
                slots = early[:count]
                names = self.index.slot_tables.rows[slots], self.index.slot_keys.rows[slots]
                self._cut.set_aside(Rows(*names, *self._copy(slots)))

    def removing(self, tables: np.ndarray, keys: np.ndarray, slots: np.ndarray) -> None:
        """These rows, of these keys, are about to go."""
        self.changing(slots)
        with self.lock:
            self.flags.rows[slots] = 0
            self._removed.append((tables.copy(), keys.copy()))

    def cut(self, read: Read, full: bool) -> Snapshot:
        """All rows as they are now, or those that changed since the last cut.  `read` is called by any thread."""
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
            self._cut = Snapshot(self, read, used, count, [] if full else removed)
        return self._cut


class Snapshot:
    """The rows of one moment.  One thread, any, goes through `shards` once, to the end."""

    def __init__(
        self,
        changes: Changes,
        read: Read,
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

    def shards(self, memory: np.ndarray, part: int) -> Iterator[Rows]:
        """All rows, as many at a time as fit into `memory`, where they are until the next ones are asked for.

        `part`: so many are copied before it is seen which of them training has changed meanwhile; those it has set aside.
        """
        at, given = 0, 0
        slots = np.empty(part, np.int64)
        index, flags, lock = self._changes.index, self._changes.flags.rows, self._changes.lock
        room = _Room(memory, *self._read(slots[:0]))
        while not self.over:
            target = room.free(part)
            with lock:
                count, at = _take(flags, at, self._used, slots[: len(target)])
            rows, taken = target[:count], slots[:count]
            rows.tables[:], rows.keys[:] = index.slot_tables.rows[taken], index.slot_keys.rows[taken]
            self._read(taken, (rows.values, rows.state))
            with lock:
                places = np.empty(count, np.int64)
                kept = places[: _keep_unchanged(flags, taken, places)]
                aside, self._aside = self._aside, []
                self.over = at == self._used
            _close_gaps(kept, rows.tables, rows.keys, rows.values, rows.state)
            room.filled += len(kept)
            for rest in aside:
                while len(rest := room.add(rest)):
                    given += room.filled
                    yield room.rows
                    room.filled = 0
            if room.filled == room.capacity or (self.over and room.filled):
                given += room.filled
                yield room.rows
                room.filled = 0
        assert given == self.count, f"{given} rows copied of {self.count}"

    def abandon(self) -> None:
        """Nobody will go on with it: training no longer sets rows aside."""
        with self._changes.lock:
            flags = self._changes.flags.rows[: self._used]
            np.bitwise_and(flags, TOUCHED, out=flags)
            self._aside, self.over = [], True
