"""Snapshots: a store's rows as they were at one moment, copied while training continues (copy-on-write).

Every slot has a byte of flags.  Before training changes a row that the current snapshot has not copied yet, it copies
that row for the snapshot.  Another thread copies all other rows in parts.  So a snapshot costs training only the rows
that change meanwhile, and its memory is those rows and the memory that it is given to copy into.
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
"""Changed since the last snapshot; not copied yet; being copied, which is void if the row changes meanwhile."""
_AHEAD = 16

Values = tuple[np.ndarray, np.ndarray]
"""Values [n, D] and state [n, S]."""


class Read(Protocol):
    """Copies of the values and state of slots, in `into` if given, else in new arrays."""

    def __call__(self, slots: np.ndarray, into: Values | None = None) -> Values: ...


@numba.njit(nogil=True, cache=True)
def _note_changes(flags, slots, uncopied):  # type: ignore[no-untyped-def]
    """Flags all slots as touched.  `uncopied` gets those that a snapshot still has to copy; returns how many."""
    count = 0
    for i in range(slots.shape[0]):
        if i + _AHEAD < slots.shape[0]:
            prefetch(flags, np.uint64(slots[i + _AHEAD]))
        if flags[slots[i]] & (PENDING | COPYING):
            uncopied[count] = slots[i]
            count += 1
        flags[slots[i]] = TOUCHED
    return count


@numba.njit(nogil=True, cache=True)
def _begin(flags, used):  # type: ignore[no-untyped-def]
    """Makes touched slots pending; returns how many."""
    count = 0
    for slot in range(used):
        if flags[slot] & TOUCHED:
            flags[slot] = PENDING
            count += 1
    return count


@numba.njit(nogil=True, cache=True)
def _take(flags, at, used, slots):  # type: ignore[no-untyped-def]
    """The next pending slots from `at` on; returns how many, and where to continue."""
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
    """Places in `slots` of rows that did not change while they were copied; returns how many."""
    count = 0
    for i in range(slots.shape[0]):
        if flags[slots[i]] & COPYING:
            flags[slots[i]] = flags[slots[i]] & ~COPYING
            places[count] = i
            count += 1
    return count


@numba.njit(nogil=True, cache=True)
def _close_gaps(places, tables, keys, values, state):  # type: ignore[no-untyped-def]
    """Moves the rows at `places` (ascending) to the front."""
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


class _RowBlock:
    """Memory as columns of rows, filled from the front.

    It is reused for every shard: fresh memory would cost more than all the copying (docs/log.md).
    """

    def __init__(self, memory: np.ndarray, values: np.ndarray, state: np.ndarray) -> None:
        """`values` and `state` have no rows; they give widths and types."""
        columns = [
            (np.dtype(np.int64), ()),
            *((a.dtype, a.shape[1:]) for a in (values, state)),
            (np.dtype(np.uint16), ()),
        ]
        widths = [kind.itemsize * int(np.prod(shape)) for kind, shape in columns]
        self.capacity = len(memory) // sum(widths)
        assert self.capacity, "the memory does not hold a single row"
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
        """Up to `most` rows to fill next."""
        return self._all[self.filled : min(self.filled + most, self.capacity)]

    def add(self, rows: Rows) -> Rows:
        """Copies as many rows as fit; returns the others."""
        target = self.free(len(rows))
        count = len(target)
        target.tables[:], target.keys[:] = rows.tables[:count], rows.keys[:count]
        target.values[:], target.state[:] = rows.values[:count], rows.state[:count]
        self.filled += count
        return rows[count:]


class Changes:
    """Tracks which rows of a store changed since the last snapshot.

    The thread that changes the store calls `before_write` and `before_remove` first, one call at a time.  `snapshot` is
    called between two batches, when nothing changes.
    """

    def __init__(self, index: HashIndex, copy: Read) -> None:
        """`copy`: reads slots; called from within `before_write`."""
        self.index = index
        self._copy = copy
        self.flags = Slab(np.uint8, ())
        self._removed: list[tuple[np.ndarray, np.ndarray]] = []
        self._snapshot: Snapshot | None = None
        self.lock = threading.Lock()

    def before_write(self, slots: np.ndarray) -> None:
        """These rows are about to be changed or created: copies those that the snapshot has not copied yet."""
        uncopied = np.empty(len(slots), np.int64)
        with self.lock:
            count = _note_changes(self.flags.rows, slots, uncopied)
            if count:
                assert self._snapshot is not None, "rows are pending without a snapshot"
                slots = uncopied[:count]
                names = self.index.slot_tables.rows[slots], self.index.slot_keys.rows[slots]
                self._snapshot.keep_copies(Rows(*names, *self._copy(slots)))

    def before_remove(self, tables: np.ndarray, keys: np.ndarray, slots: np.ndarray) -> None:
        """The rows of these keys, in these slots, are about to be removed."""
        self.before_write(slots)
        with self.lock:
            self.flags.rows[slots] = 0
            self._removed.append((tables.copy(), keys.copy()))

    def snapshot(self, read: Read, full: bool) -> Snapshot:
        """A snapshot of all rows, or of those that changed since the last one.  Any thread may call `read`."""
        assert self._snapshot is None or self._snapshot.over, "one snapshot at a time"
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
            self._snapshot = Snapshot(self, read, used, count, [] if full else removed)
        return self._snapshot


class Snapshot:
    """The rows of one moment.  One thread iterates over `shards` once, to the end."""

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
        """Rows in the snapshot."""
        nothing = (np.empty(0, np.uint16), np.empty(0, np.int64))
        self.removed_tables, self.removed_keys = (np.concatenate(parts) for parts in zip(nothing, *removed))
        """Keys removed since the last snapshot.  A key that has come back since is among the rows too."""
        self._copies: list[Rows] = []
        self.over = False

    def keep_copies(self, rows: Rows) -> None:
        """Takes copies of rows that training is about to change (copy-on-write).  Under the lock of `Changes`."""
        self._copies.append(rows)

    def shards(self, memory: np.ndarray, part: int) -> Iterator[Rows]:
        """Yields all rows, as many at a time as fit into `memory`, which the next shard overwrites.

        `part`: rows copied between two checks for changes.  Rows that training changed meanwhile come from its copies.
        """
        at, given = 0, 0
        slots = np.empty(part, np.int64)
        index, flags, lock = self._changes.index, self._changes.flags.rows, self._changes.lock
        block = _RowBlock(memory, *self._read(slots[:0]))
        while not self.over:
            target = block.free(part)
            with lock:
                count, at = _take(flags, at, self._used, slots[: len(target)])
            rows, taken = target[:count], slots[:count]
            rows.tables[:], rows.keys[:] = index.slot_tables.rows[taken], index.slot_keys.rows[taken]
            self._read(taken, (rows.values, rows.state))
            with lock:
                places = np.empty(count, np.int64)
                kept = places[: _keep_unchanged(flags, taken, places)]
                copies, self._copies = self._copies, []
                self.over = at == self._used
            _close_gaps(kept, rows.tables, rows.keys, rows.values, rows.state)
            block.filled += len(kept)
            for rest in copies:
                while len(rest := block.add(rest)):
                    given += block.filled
                    yield block.rows
                    block.filled = 0
            if block.filled == block.capacity or (self.over and block.filled):
                given += block.filled
                yield block.rows
                block.filled = 0
        assert given == self.count, f"{given} rows copied of {self.count}"

    def abandon(self) -> None:
        """Ends the snapshot early: training stops copying rows for it."""
        with self._changes.lock:
            flags = self._changes.flags.rows[: self._used]
            np.bitwise_and(flags, TOUCHED, out=flags)
            self._copies, self.over = [], True
