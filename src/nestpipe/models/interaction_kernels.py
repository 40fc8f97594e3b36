"""Numba kernels of DLRM's interaction on the host, without the GIL: sample by sample, in a small room that stays in the cache.

`reassoc` lets a sum over a vector's numbers run in lanes.  Its order depends on the place of the pair and on the dimension alone,
so a sample has the same dots in every micro-batch.
"""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract"})
def interact(first, others, out):  # type: ignore[no-untyped-def]
    """out[b] = the first vector of sample b, if any, then the dots of all pairs (i, j), j < i, i by i.

    `first` is [B, 1 or 0, D], `others` [B, F, D].
    """
    samples, firsts, dim = first.shape
    count = firsts + others.shape[1]
    vectors = np.empty((count, dim), others.dtype)
    zero = np.zeros(1, others.dtype)[0]
    for b in range(samples):
        vectors[:firsts] = first[b]
        vectors[firsts:] = others[b]
        to = out[b]
        at = firsts * dim
        if firsts:
            to[:dim] = vectors[0]
        for i in range(1, count):
            one = vectors[i]
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
    padded = (count + 3) // 4 * 4  # partners are taken four at a time; those beyond `count` stay zero
    vectors = np.zeros((padded, dim), others.dtype)
    pairs = np.zeros((count, padded), others.dtype)
    summed = np.empty(dim, others.dtype)
    for b in range(samples):
        vectors[:firsts] = first[b]
        vectors[firsts:count] = others[b]
        of = grads[b]
        at = firsts * dim
        for i in range(count):
            for j in range(i):
                pairs[i, j] = of[at + j]
                pairs[j, i] = of[at + j]
            at += i
        for i in range(count):
            weights = pairs[i]
            if i < firsts:
                summed[:] = of[:dim]
            else:
                summed[:] = 0
            for j in range(0, padded, 4):
                p, q, r, s = vectors[j], vectors[j + 1], vectors[j + 2], vectors[j + 3]
                by_p, by_q, by_r, by_s = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
                for d in range(dim):
                    summed[d] += (by_p * p[d] + by_q * q[d]) + (by_r * r[d] + by_s * s[d])
            if i < firsts:
                grad_first[b, i] = summed
            else:
                grad_others[b, i - firsts] = summed
