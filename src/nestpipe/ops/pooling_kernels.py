"""Numba kernels between a window's rows and the model: pooling forward and backward, in a fixed order, without the GIL.

Ids lie lookup by lookup, outputs sample by sample.  The loops follow the outputs, the larger of the two, so these are
read and written once and in order.  Rows lie all over memory; prefetching lets their misses overlap.  Outputs are flat,
with the distance from sample to sample: autograd often passes back a slice of something wider, which then need not be
copied.
"""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.ops.rows_kernels import prefetch_row


@numba.njit(nogil=True, cache=True)
def _starts(lengths):  # type: ignore[no-untyped-def]
    """Where each bag starts among the ids, and where the last one ends."""
    starts = np.empty(lengths.shape[0] + 1, np.int64)
    total = 0
    for i in range(lengths.shape[0]):
        starts[i] = total
        total += lengths[i]
    starts[lengths.shape[0]] = total
    return starts


@numba.njit(nogil=True, cache=True)
def pool(rows, index, lengths, weights, means, columns, out, stride):  # type: ignore[no-untyped-def]
    """out[b * stride + columns[l]:+D] = sum (or mean) of weight * row over bag (l, b).  No `weights`: all ones."""
    dim = rows.shape[1]
    starts = _starts(lengths)
    samples = lengths.shape[0] // max(1, columns.shape[0])
    weighted = weights.shape[0] > 0
    for b in range(samples):
        for l in range(columns.shape[0]):
            start, end = starts[l * samples + b], starts[l * samples + b + 1]
            if b + 1 < samples and end < index.shape[0]:
                prefetch_row(rows, index[end])  # of the next sample, whose turn comes after all lookups of this one
            pooled = out[b * stride + columns[l] : b * stride + columns[l] + dim]
            if start == end:
                pooled[:] = 0
                continue
            row = rows[index[start]]
            if weighted:
                for d in range(dim):
                    pooled[d] = weights[start] * row[d]
            else:
                for d in range(dim):
                    pooled[d] = row[d]
            for j in range(start + 1, end):
                row = rows[index[j]]
                if weighted:
                    for d in range(dim):
                        pooled[d] += weights[j] * row[d]
                else:
                    for d in range(dim):
                        pooled[d] += row[d]
            if means[l] and end - start > 1:
                for d in range(dim):
                    pooled[d] /= end - start


@numba.njit(nogil=True, cache=True)
def pool_backward(grad_out, stride, index, lengths, weights, means, columns, grad_rows, one):  # type: ignore[no-untyped-def]
    """Adds the gradient of `pool` to grad_rows.  `one` is a one-element array of the rows' dtype that holds 1."""
    dim = grad_rows.shape[1]
    starts = _starts(lengths)
    samples = lengths.shape[0] // max(1, columns.shape[0])
    weighted = weights.shape[0] > 0
    for b in range(samples):
        for l in range(columns.shape[0]):
            start, end = starts[l * samples + b], starts[l * samples + b + 1]
            if b + 1 < samples and end < index.shape[0]:
                prefetch_row(grad_rows, index[end])
            passed = grad_out[b * stride + columns[l] : b * stride + columns[l] + dim]
            divided = means[l] and end - start > 1
            for j in range(start, end):
                row = grad_rows[index[j]]
                if weighted or divided:
                    factor = weights[j] if weighted else one[0]
                    if divided:
                        factor = factor / (end - start)
                    for d in range(dim):
                        row[d] += factor * passed[d]
                else:
                    for d in range(dim):
                        row[d] += passed[d]


@numba.njit(nogil=True, cache=True)
def pool_backward_weights(grad_out, stride, rows, index, lengths, means, columns, grad_weights):  # type: ignore[no-untyped-def]
    """grad_weights[j] = dot of its bag's output gradient with its row."""
    dim = rows.shape[1]
    starts = _starts(lengths)
    samples = lengths.shape[0] // max(1, columns.shape[0])
    for b in range(samples):
        for l in range(columns.shape[0]):
            start, end = starts[l * samples + b], starts[l * samples + b + 1]
            passed = grad_out[b * stride + columns[l] : b * stride + columns[l] + dim]
            for j in range(start, end):
                row = rows[index[j]]
                total = grad_weights[j] * 0
                for d in range(dim):
                    total += passed[d] * row[d]
                if means[l] and end - start > 1:
                    total = total / (end - start)
                grad_weights[j] = total


@numba.njit(nogil=True, cache=True)
def compact(index, number_of):  # type: ignore[no-untyped-def]
    """The places that occur in `index`, each once and by first use, and for every entry the number of its place.

    `number_of` has an entry of -1 for every possible place.  It is overwritten.
    """
    found = np.empty(min(index.shape[0], number_of.shape[0]), np.int32)
    inverse = np.empty(index.shape[0], np.int32)
    count = 0
    for i in range(index.shape[0]):
        place = index[i]
        number = number_of[place]
        if number < 0:
            number = count
            number_of[place] = number
            found[number] = place
            count += 1
        inverse[i] = number
    return found[:count], inverse
