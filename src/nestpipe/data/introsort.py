"""An unstable sort whose order of ties is the same on every CPU.

pandas' `sort_values` sorts with numpy's quicksort by default.  Where the CPU has AVX2 or AVX-512, numpy (from 1.25 and 2.0 on)
takes a vectorised sort instead, which leaves ties in another order.  This one moves indices exactly as numpy's portable
introsort does: quicksort around the median of three, heapsort where that goes too deep, insertion sort of short ranges.
"""

from __future__ import annotations

import numba
import numpy as np

SHORT = 15
"""A range with so many steps from its first to its last place, or fewer, is sorted by insertion."""
DEEPEST = 128
"""Ranges that can wait: each is the larger half of the one before, so 64 are enough for any array."""


def introsort(values: np.ndarray) -> np.ndarray:
    """The places 0, 1, ... in ascending order of `values`, whole numbers.  Equal values come in no particular order, but always
    in the same one: it depends on all values and their places."""
    return _introsort(np.ascontiguousarray(values, np.int64))


@numba.njit(nogil=True, cache=True)
def _introsort(values: np.ndarray) -> np.ndarray:
    order = np.arange(values.shape[0])
    firsts, lasts, depths = np.empty(DEEPEST, np.int64), np.empty(DEEPEST, np.int64), np.empty(DEEPEST, np.int64)
    firsts[0], lasts[0] = 0, values.shape[0] - 1
    depths[0] = 0
    size = values.shape[0]
    while size > 1:  # twice the whole part of the logarithm
        size >>= 1
        depths[0] += 2
    waiting = 1
    while waiting:
        waiting -= 1
        first, last, depth = firsts[waiting], lasts[waiting], depths[waiting]
        if depth < 0:
            _heapsort(values, order, first, last)
            continue
        while last - first > SHORT:
            middle = _partition(values, order, first, last)
            depth -= 1
            if middle - first < last - middle:
                firsts[waiting], lasts[waiting] = middle + 1, last
                last = middle - 1
            else:
                firsts[waiting], lasts[waiting] = first, middle - 1
                first = middle + 1
            depths[waiting] = depth  # the larger half waits; the depth is looked at when it is taken up
            waiting += 1
        _insertion_sort(values, order, first, last)
    return order


@numba.njit(nogil=True, cache=True)
def _swap(order: np.ndarray, a: int, b: int) -> None:
    order[a], order[b] = order[b], order[a]


@numba.njit(nogil=True, cache=True)
def _partition(values: np.ndarray, order: np.ndarray, first: int, last: int) -> int:
    """Puts the median of the first, middle and last value where it belongs, and the others on their side of it."""
    middle = first + ((last - first) >> 1)
    if values[order[middle]] < values[order[first]]:
        _swap(order, middle, first)
    if values[order[last]] < values[order[middle]]:
        _swap(order, last, middle)
    if values[order[middle]] < values[order[first]]:
        _swap(order, middle, first)
    pivot = values[order[middle]]
    low, high = first, last - 1
    _swap(order, middle, high)
    while True:
        low += 1
        while values[order[low]] < pivot:
            low += 1
        high -= 1
        while pivot < values[order[high]]:
            high -= 1
        if low >= high:
            break
        _swap(order, low, high)
    _swap(order, low, last - 1)
    return low


@numba.njit(nogil=True, cache=True)
def _insertion_sort(values: np.ndarray, order: np.ndarray, first: int, last: int) -> None:
    for place in range(first + 1, last + 1):
        moved, at = order[place], place
        while at > first and values[moved] < values[order[at - 1]]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = moved


@numba.njit(nogil=True, cache=True)
def _heapsort(values: np.ndarray, order: np.ndarray, first: int, last: int) -> None:
    count = last - first + 1
    for root in range(count // 2, 0, -1):
        _sift(values, order, first, root, count, order[first + root - 1])
    for size in range(count - 1, 0, -1):
        moved = order[first + size]
        order[first + size] = order[first]
        _sift(values, order, first, 1, size, moved)


@numba.njit(nogil=True, cache=True)
def _sift(values: np.ndarray, order: np.ndarray, first: int, root: int, size: int, moved: int) -> None:
    """Puts `moved` into the heap of `size` places from `first` on, at `root` (from 1) or below."""
    at, child = root, 2 * root
    while child <= size:
        if child < size and values[order[first + child - 1]] < values[order[first + child]]:
            child += 1
        if not values[moved] < values[order[first + child - 1]]:
            break
        order[first + at - 1] = order[first + child - 1]
        at, child = child, 2 * child
    order[first + at - 1] = moved
