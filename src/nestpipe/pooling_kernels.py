"""Numba kernels between a window's rows and the model: pooled forward and backward, in a fixed order, without the GIL."""

from __future__ import annotations

import numba


@numba.njit(nogil=True, cache=True)
def pool(rows, index, lengths, weights, means, columns, out):  # type: ignore[no-untyped-def]
    """out[b, columns[l]:+D] = sum (or mean) over the bag (l, b) of weight * row.  `weights` is empty for all ones."""
    dim = rows.shape[1]
    samples = out.shape[0]
    at = 0
    for l in range(columns.shape[0]):
        column = columns[l]
        for b in range(samples):
            length = lengths[l * samples + b]
            for d in range(dim):
                out[b, column + d] = 0
            for j in range(at, at + length):
                row = index[j]
                if weights.shape[0]:
                    for d in range(dim):
                        out[b, column + d] += weights[j] * rows[row, d]
                else:
                    for d in range(dim):
                        out[b, column + d] += rows[row, d]
            if means[l] and length > 1:
                for d in range(dim):
                    out[b, column + d] /= length
            at += length


@numba.njit(nogil=True, cache=True)
def pool_backward(grad_out, index, lengths, weights, means, columns, grad_rows, one):  # type: ignore[no-untyped-def]
    """Adds to grad_rows what `pool` passes back; `one` is a one-element array of the rows' dtype holding 1."""
    dim = grad_rows.shape[1]
    samples = grad_out.shape[0]
    at = 0
    for l in range(columns.shape[0]):
        column = columns[l]
        for b in range(samples):
            length = lengths[l * samples + b]
            for j in range(at, at + length):
                row = index[j]
                factor = one[0]
                if weights.shape[0]:
                    factor = weights[j]
                if means[l] and length > 1:
                    factor = factor / length
                for d in range(dim):
                    grad_rows[row, d] += factor * grad_out[b, column + d]
            at += length


@numba.njit(nogil=True, cache=True)
def pool_backward_weights(grad_out, rows, index, lengths, means, columns, grad_weights):  # type: ignore[no-untyped-def]
    """grad_weights[j] = dot of its bag's output gradient with its row."""
    dim = rows.shape[1]
    samples = grad_out.shape[0]
    at = 0
    for l in range(columns.shape[0]):
        column = columns[l]
        for b in range(samples):
            length = lengths[l * samples + b]
            for j in range(at, at + length):
                total = grad_weights[j] * 0
                for d in range(dim):
                    total += grad_out[b, column + d] * rows[index[j], d]
                if means[l] and length > 1:
                    total = total / length
                grad_weights[j] = total
            at += length
