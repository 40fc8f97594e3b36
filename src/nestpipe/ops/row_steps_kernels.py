"""Numba kernels of the sparse optimizers: one step on every row of a buffer.  All release the GIL.

They divide as numpy does: Python's check for zero would prevent vectorisation.
"""

from __future__ import annotations

import math

import numba

from nestpipe.ops.row_squares import row_sum_of_squares


@numba.njit(nogil=True, cache=True, error_model="numpy")
def sgd(values, grads, scalars):  # type: ignore[no-untyped-def]
    lr = scalars[0]
    for i in range(values.shape[0]):
        for d in range(values.shape[1]):
            values[i, d] -= lr * grads[i, d]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def rowwise_adagrad(values, state, grads, scalars):  # type: ignore[no-untyped-def]
    lr, eps, scale = scalars[0], scalars[1], scalars[2]
    dim = values.shape[1]
    for i in range(values.shape[0]):
        state[i, 0] += scale * (row_sum_of_squares(grads, i, grads.dtype.type(0)) / dim)
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
