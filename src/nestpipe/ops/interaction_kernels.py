"""Numba kernels of DLRM's interaction on the host, without the GIL: sample by sample, in a small room that stays in the cache.

`reassoc` lets a sum over a vector's numbers run in lanes.  Its order depends on the place of the pair and on the dimension alone,
so a sample has the same dots in every micro-batch.
"""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.keys.native import TILE_BYTES, sum_scaled_rows


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract"})
def interact(first, others, out):  # type: ignore[no-untyped-def]
    """out[b] = the first vector of sample b, if any, then the dots of all pairs (i, j), j < i, i by i.

    `first` is [B, 1 or 0, D], `others` [B, F, D].
    """
    samples, firsts, dim = first.shape
    zero = np.zeros(1, others.dtype)[0]
    for b in range(samples):
        vectors, to = others[b], out[b]
        at = firsts * dim
        if firsts:
            for d in range(dim):
                to[d] = first[b, 0, d]
        for i in range(vectors.shape[0]):
            one = vectors[i]
            if firsts:
                p = first[b, 0]
                dot_p = zero
                for d in range(dim):
                    dot_p += one[d] * p[d]
                to[at] = dot_p
                at += 1
            j = 0
            while j + 4 <= i:  # four at a time: `one` is read once for them
                p, q, r, s = vectors[j], vectors[j + 1], vectors[j + 2], vectors[j + 3]
                dot_p = dot_q = dot_r = dot_s = zero
                for d in range(dim):
                    dot_p += one[d] * p[d]
                    dot_q += one[d] * q[d]
                    dot_r += one[d] * r[d]
                    dot_s += one[d] * s[d]
                to[at + j], to[at + j + 1], to[at + j + 2], to[at + j + 3] = dot_p, dot_q, dot_r, dot_s
                j += 4
            while j < i:
                p = vectors[j]
                dot_p = zero
                for d in range(dim):
                    dot_p += one[d] * p[d]
                to[at + j] = dot_p
                j += 1
            at += i


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def interact_backward(grads, first, others, grad_first, grad_others):  # type: ignore[no-untyped-def]
    """What `interact` passes back: every vector meets each of its partners, with the gradient of their dot."""
    samples, firsts, dim = first.shape
    count = firsts + others.shape[1]
    vectors = np.empty((count, dim), others.dtype)
    pairs = np.zeros((count + count % 2, count), others.dtype)  # rows are summed two at a time
    summed = np.empty((count + count % 2, dim), others.dtype)
    tile = TILE_BYTES // vectors.itemsize
    whole = dim // tile * tile
    for b in range(samples):
        for i in range(count):
            of = first[b, 0] if i < firsts else others[b, i - firsts]
            to = vectors[i]
            for d in range(dim):
                to[d] = of[d]
        at = firsts * dim
        for i in range(count):
            for j in range(i):
                pairs[i, j] = grads[b, at + j]
                pairs[j, i] = grads[b, at + j]
            at += i
        for i in range(0, count, 2):
            for d in range(0, whole, tile):
                sum_scaled_rows(pairs, i * count, vectors, d, dim, count, summed, i * dim + d)
        for i in range(count):
            for d in range(whole, dim):
                total = pairs[i, 0] * vectors[0, d]
                for j in range(1, count):
                    total += pairs[i, j] * vectors[j, d]
                summed[i, d] = total
        for i in range(count):
            of = summed[i]
            if i < firsts:
                for d in range(dim):
                    grad_first[b, i, d] = of[d] + grads[b, d]
            else:
                to = grad_others[b, i - firsts]
                for d in range(dim):
                    to[d] = of[d]
