"""Numba kernels over rows of arrays: gathers and sums.  All release the GIL.

Results must be bit-equal under every schedule, so the order of sums is fixed.
"""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.keys.prefetch import prefetch
from nestpipe.ops.row_squares import row_sum_of_squares

_AHEAD = 16
_LINE = 64


@numba.njit(nogil=True, cache=True, inline="always")
def prefetch_row(rows, at):  # type: ignore[no-untyped-def]
    """Prefetches a row that will be touched soon: rows are scattered over memory, and waiting for each miss is slow."""
    if at >= 0:
        start = np.uint64(at) * np.uint64(rows.shape[1])
        for d in range(0, rows.shape[1], _LINE // rows.itemsize):
            prefetch(rows, start + np.uint64(d))


@numba.njit(nogil=True, cache=True)
def gather(source, index, target):  # type: ignore[no-untyped-def]
    """target[i] = source[index[i]]; rows with a negative index are unchanged."""
    count = index.shape[0]
    for i in range(count):
        if i + _AHEAD < count:
            prefetch_row(source, index[i + _AHEAD])
        j = index[i]
        if j >= 0:
            for d in range(source.shape[1]):
                target[i, d] = source[j, d]


@numba.njit(nogil=True, cache=True)
def scatter(source, index, target):  # type: ignore[no-untyped-def]
    """target[index[i]] = source[i]."""
    count = index.shape[0]
    for i in range(count):
        if i + _AHEAD < count:
            prefetch_row(target, index[i + _AHEAD])
        j = index[i]
        for d in range(source.shape[1]):
            target[j, d] = source[i, d]


@numba.njit(nogil=True, cache=True)
def copy_rows(source, source_index, target, target_index):  # type: ignore[no-untyped-def]
    """target[target_index[i]] = source[source_index[i]]."""
    for i in range(source_index.shape[0]):
        s, t = source_index[i], target_index[i]
        for d in range(source.shape[1]):
            target[t, d] = source[s, d]


@numba.njit(nogil=True, cache=True)
def poison(rows, index):  # type: ignore[no-untyped-def]
    """Poisons rows that are still to be filled: a read that comes too early gets NaN, and the run stops."""
    for i in range(index.shape[0]):
        rows[index[i], 0] = np.nan


@numba.njit(nogil=True, cache=True)
def scatter_add(source, index, target):  # type: ignore[no-untyped-def]
    """target[index[i]] += source[i], in the order of i."""
    for i in range(index.shape[0]):
        j = index[i]
        for d in range(source.shape[1]):
            target[j, d] += source[i, d]


@numba.njit(nogil=True, cache=True)
def sum_of_squares(grads):  # type: ignore[no-untyped-def]
    """In float64, row by row.  Not finite if and only if a gradient is not: squares of float32 cannot overflow."""
    total = 0.0
    for i in range(grads.shape[0]):
        total += row_sum_of_squares(grads, i, np.float64(0))
    return total


@numba.njit(nogil=True, cache=True)
def scale(grads, factor):  # type: ignore[no-untyped-def]
    for i in range(grads.shape[0]):
        for d in range(grads.shape[1]):
            grads[i, d] *= factor[0]
