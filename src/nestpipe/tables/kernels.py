"""Numba kernels over rows: first values, gathers, sums and optimizer steps.  All release the GIL.

Results must be bit-equal under every schedule, so the order of sums is fixed.  Only sums within a row may be reordered,
and only by the compiler ("reassoc"), which uses one order for all rows of a dimension.  Optimizers divide as numpy
does: Python's check for zero would prevent vectorisation.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from nestpipe.keys.mixing import STEP, mix, uniform
from nestpipe.keys.prefetch import prefetch

_AHEAD = 16
_LINE = 64


@numba.njit(nogil=True, cache=True)
def first_values(rows, missing, keys, tables, table_seeds, normal, scales):  # type: ignore[no-untyped-def]
    """Fills rows[i] for every i in `missing` from (table seed, key) alone.

    `normal[t]`, `scales[t]`: table t's distribution.
    """
    dim = rows.shape[1]
    for j in range(missing.shape[0]):
        i = missing[j]
        t = tables[i]
        base = mix(mix(np.uint64(keys[i])) ^ table_seeds[t])
        for d in range(dim):
            u = uniform(mix(base + np.uint64(2 * d + 1) * STEP))
            if normal[t]:
                v = uniform(mix(base + np.uint64(2 * d + 2) * STEP))
                x = math.sqrt(-2.0 * math.log(1.0 - u)) * math.cos(2.0 * math.pi * v)
            else:
                x = 2.0 * u - 1.0
            rows[i, d] = scales[t] * x


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


@numba.njit(nogil=True, cache=True, fastmath={"reassoc"})
def _row_sum_of_squares(grads, i, zero):  # type: ignore[no-untyped-def]
    """In the type of `zero`.  A separate function, so that the compiler reorders nothing else in its callers."""
    total = zero
    for d in range(grads.shape[1]):
        g = type(zero)(grads[i, d])
        total += g * g
    return total


@numba.njit(nogil=True, cache=True)
def sum_of_squares(grads):  # type: ignore[no-untyped-def]
    """In float64, row by row.  Not finite if and only if a gradient is not: squares of float32 cannot overflow."""
    total = 0.0
    for i in range(grads.shape[0]):
        total += _row_sum_of_squares(grads, i, np.float64(0))
    return total


@numba.njit(nogil=True, cache=True)
def scale(grads, factor):  # type: ignore[no-untyped-def]
    for i in range(grads.shape[0]):
        for d in range(grads.shape[1]):
            grads[i, d] *= factor[0]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def sgd(values, grads, scalars):  # type: ignore[no-untyped-def]
    lr = scalars[0]
    for i in range(values.shape[0]):
        for d in range(values.shape[1]):
            values[i, d] -= lr * grads[i, d]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def rowwise_adagrad(values, state, grads, scalars):  # type: ignore[no-untyped-def]
    lr, eps = scalars[0], scalars[1]
    dim = values.shape[1]
    for i in range(values.shape[0]):
        state[i, 0] += _row_sum_of_squares(grads, i, grads.dtype.type(0)) / dim
        step = lr / (math.sqrt(state[i, 0]) + eps)
        for d in range(dim):
            values[i, d] -= step * grads[i, d]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def adagrad(values, state, grads, scalars):  # type: ignore[no-untyped-def]
    lr, eps = scalars[0], scalars[1]
    for i in range(values.shape[0]):
        for d in range(values.shape[1]):
            g = grads[i, d]
            state[i, d] += g * g
            values[i, d] -= lr * (g / (math.sqrt(state[i, d]) + eps))


@numba.njit(nogil=True, cache=True, error_model="numpy")
def adam(values, state, grads, scalars):  # type: ignore[no-untyped-def]
    step_size, keep1, keep2, eps = scalars[0], scalars[1], scalars[2], scalars[3]
    dim = values.shape[1]
    for i in range(values.shape[0]):
        for d in range(dim):
            g = grads[i, d]
            m = state[i, d] + (g - state[i, d]) * keep1
            v = state[i, dim + d] + (g * g - state[i, dim + d]) * keep2
            state[i, d] = m
            state[i, dim + d] = v
            values[i, d] -= step_size * (m / (math.sqrt(v) + eps))
