"""Decides which rows stay in DRAM: those that batches touch most often, with old touches counting less.

Every row, in DRAM or not, has a small count of the batches that touched it ("heat"), halved from time to time.  A
trained row that is not in DRAM enters it only if the coldest of the next few slots is no hotter; otherwise it goes back
to disk.  So a row of the long tail, touched once, does not replace one that half of all batches touch, and choosing
needs no list and no sort.
"""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.keys.prefetch import prefetch
from nestpipe.keys.slab import Slab

MOST = 127
LOOK = 16
"""Slots inspected per choice; the coldest of them may be replaced."""
HALVE_AFTER = 10
"""Counts are halved after this many touches per DRAM slot, and at most once in as many batches."""
_PINNED = np.uint8(0x80)
_EMPTY = -1
_AHEAD = 16


@numba.njit(nogil=True, cache=True)
def _warm(heat, at, most):  # type: ignore[no-untyped-def]
    """Adds one touch to each place."""
    count = at.shape[0]
    for i in range(count):
        if i + _AHEAD < count:
            prefetch(heat, np.uint64(at[i + _AHEAD]))
        if heat[at[i]] < most:
            heat[at[i]] += np.uint8(1)


@numba.njit(nogil=True, cache=True)
def _choose(marks, hand, keep, candidates, heat, look, entering, victims):  # type: ignore[no-untyped-def]
    """Gives each candidate in turn the coldest of the next `look` slots, if that is no hotter than the candidate.

    Slots in `keep` and slots already given are passed over.  Fills `entering` with the numbers of candidates that enter
    and `victims` with their slots.  Returns how many, and the new position of the hand.
    """
    for i in range(keep.shape[0]):
        marks[keep[i]] |= _PINNED
    found = 0
    for c in range(candidates.shape[0]):
        coldest, least = -1, _PINNED
        seen, passed = 0, 0
        while seen < look and passed < marks.shape[0]:
            mark = marks[hand]
            if mark < _PINNED:
                seen += 1
                if mark < least:
                    coldest, least = hand, mark
            passed += 1
            hand += 1
            if hand == marks.shape[0]:
                hand = 0
        if seen == 0:
            break
        if least <= heat[candidates[c]]:
            entering[found] = c
            victims[found] = coldest
            marks[coldest] |= _PINNED
            found += 1
    for i in range(keep.shape[0]):
        marks[keep[i]] &= ~_PINNED
    for i in range(found):
        marks[victims[i]] &= ~_PINNED
    return found, hand


@numba.njit(nogil=True, cache=True)
def _halve(heat, count):  # type: ignore[no-untyped-def]
    for i in range(count):
        heat[i] >>= np.uint8(1)


class HotRows:
    """Slots 0..capacity-1 and the row that each holds.  Choices depend on the calls alone, so runs are reproducible."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._rows = np.zeros(capacity, np.int64)
        self._marks = np.zeros(capacity, np.uint8)
        """Heat by slot, for rows in DRAM.  `_heat` is by row, and up to date only for rows that are not in DRAM."""
        self._heat = Slab(np.uint8, ())
        self._known = 0
        self._hand = 0
        self._touches = 0
        self._left = np.empty(0, np.int64)
        """Slots whose row was removed, ascending.  They are filled first."""

    def choose(self, rows: np.ndarray, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Places in `rows` (touched, not in DRAM) of rows that enter DRAM, their slots, and the rows they replace.

        The last of the slots hold the rows to replace; the first are empty.  Slots in `keep` are not chosen.
        Nothing moves until `fill`.
        """
        heat = self._heat.rows
        self._known = max(self._known, int(rows.max(initial=-1)) + 1)
        _warm(heat, rows, MOST)
        self._count(len(rows))
        unused = np.arange(self.used, min(self.used + max(0, len(rows) - len(self._left)), self.capacity))
        unused = np.concatenate([self._left[: len(rows)], unused])
        rest = rows[len(unused) :]
        entering, victims = np.empty(len(rest), np.int64), np.empty(len(rest), np.int64)
        pinned = np.concatenate([keep, unused])
        found, self._hand = _choose(self._marks, self._hand, pinned, rest, heat, LOOK, entering, victims)
        entering, victims = entering[:found] + len(unused), victims[:found]
        places = np.concatenate([np.arange(len(unused)), entering])
        return places, np.concatenate([unused, victims]), self._rows[victims]

    def fill(self, slots: np.ndarray, rows: np.ndarray) -> None:
        """Puts rows into the slots that `choose` gave."""
        if len(self._left):
            self._left = np.setdiff1d(self._left, slots)
        was = slots[slots < self.used]
        was = was[self._rows[was] >= 0]
        self._heat.rows[self._rows[was]] = self._marks[was]
        self._rows[slots] = rows
        self._marks[slots] = self._heat.rows[rows]
        self.used = min(self.capacity, max(self.used, int(slots.max(initial=-1)) + 1))

    def remove(self, slots: np.ndarray, rows: np.ndarray) -> None:
        """Forgets these rows, and empties the slots of those that were in DRAM."""
        self._left = np.union1d(self._left, slots)
        self._rows[slots] = _EMPTY
        self._marks[slots] = 0
        self._heat.rows[rows] = 0

    def touch(self, slots: np.ndarray) -> None:
        """Counts a batch that touched these slots."""
        _warm(self._marks, slots, MOST)
        self._count(len(slots))

    def nbytes(self) -> int:
        return self.used * (self._rows.itemsize + self._marks.itemsize) + self._known

    def _count(self, touches: int) -> None:
        self._touches += touches
        if self._touches >= HALVE_AFTER * max(self.capacity, touches):
            self._touches = 0
            _halve(self._heat.rows, self._known)
            _halve(self._marks, self.capacity)
