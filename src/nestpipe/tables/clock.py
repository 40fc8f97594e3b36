"""Which rows stay in DRAM: CLOCK with a small counter per slot.

A row enters with count 0 and each later batch that touches it adds 1, up to `MOST`.  The hand goes round and takes 1 from what it
passes; a row at 0 has to leave.  So rows of the long tail, touched once, leave first, and a choice costs no list and no sort.
"""

from __future__ import annotations

import numba
import numpy as np

MOST = 3
_PINNED = np.uint8(0x80)


@numba.njit(nogil=True, cache=True)
def _sweep(marks, hand, keep, chosen):  # type: ignore[no-untyped-def]
    """Fills `chosen` with slots, none of them in `keep`.  Returns the new hand."""
    for i in range(keep.shape[0]):
        marks[keep[i]] |= _PINNED
    found = 0
    while found < chosen.shape[0]:
        mark = marks[hand]
        if mark == 0:
            chosen[found] = hand
            found += 1
            marks[hand] = _PINNED  # not twice
        elif mark < _PINNED:
            marks[hand] = mark - np.uint8(1)
        hand += 1
        if hand == marks.shape[0]:
            hand = 0
    for i in range(keep.shape[0]):
        marks[keep[i]] &= ~_PINNED
    for i in range(chosen.shape[0]):
        marks[chosen[i]] = 0
    return hand


@numba.njit(nogil=True, cache=True)
def _touch(marks, slots, most):  # type: ignore[no-untyped-def]
    for i in range(slots.shape[0]):
        if marks[slots[i]] < most:
            marks[slots[i]] += np.uint8(1)


class Clock:
    """Slots 0..capacity-1 and the row that each holds.  What it chooses depends on the calls alone, so runs repeat."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self._rows = np.zeros(capacity, np.int64)
        self._marks = np.zeros(capacity, np.uint8)
        self._hand = 0

    def choose(self, count: int, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`count` slots for new rows and the rows that have to leave them: the last of the slots, in this order.

        The slots in `keep` are not chosen.  Changes nothing before `fill`.
        """
        assert count + len(keep) <= self.capacity
        unused = np.arange(self.used, min(self.used + count, self.capacity))
        victims = np.empty(count - len(unused), np.int64)
        if len(victims):
            self._hand = _sweep(self._marks, self._hand, np.concatenate([keep, unused]), victims)
        return np.concatenate([unused, victims]), self._rows[victims]

    def fill(self, slots: np.ndarray, rows: np.ndarray) -> None:
        """Rows enter the slots that `choose` gave."""
        self._rows[slots] = rows
        self.used = min(self.capacity, max(self.used, int(slots.max(initial=-1)) + 1))

    def touch(self, slots: np.ndarray) -> None:
        """A batch used these slots again."""
        _touch(self._marks, slots, MOST)

    def nbytes(self) -> int:
        return self.used * (self._rows.itemsize + self._marks.itemsize)
