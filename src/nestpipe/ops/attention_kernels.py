"""Numba kernels of jagged attention on the host, without the GIL: tile by tile over each sample's own pairs of places.

Tokens lie one after the other without padding.  Sample b has the keys and values of tokens key_starts[b] to
key_starts[b + 1], and the queries of its last places, query_starts[b] to query_starts[b + 1]: all of them in training,
fewer where keys and values of earlier places come from a cache.  `times` has one more entry a sample than it has keys:
the time of what follows.

A tile is `rows` places that look back by `columns` places that they look at.  Tiles begin at multiples of their size, so a
pair of places is in the same tile whatever the number of queries.  Scores of a tile are made, weighed and multiplied while
they are in cache.  The backward pass makes them again; nothing of the size of all pairs is ever kept.
"""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.ops.event_kernels import biases, biases_backward, in_order
from nestpipe.ops.gemm import CELLS, multiply, prepare
from nestpipe.ops.register_math import sigmoid

SCORE_BIAS, THREE_CHANNELS, TWO_CHANNELS = 0, 1, 2
"""What the biases of a pair do: they are added to its score (HSTU), or are weights of channels of their own, beside the
scores' channel (FuXi-alpha) or alone (FuXi-beta and gamma)."""


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def weigh(low, left, r, c, scores, of_time, of_place, biased, scale):  # type: ignore[no-untyped-def]
    """In place: scale * silu(score + bias) where a place looks back, 0 elsewhere."""
    for a in range(r):
        seen = max(0, min(c, low + a - left + 1))
        x = scores[a * c : (a + 1) * c]
        if biased:
            t, p = of_time[a * c : (a + 1) * c], of_place[a * c : (a + 1) * c]
            for z in range(seen):
                s = x[z] + (t[z] + p[z])
                x[z] = scale * (s * sigmoid(s))
        else:
            for z in range(seen):
                x[z] = scale * (x[z] * sigmoid(x[z]))
        x[seen:] = 0


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def weigh_backward(low, left, r, c, scores, grads, of_time, of_place, biased, scale):  # type: ignore[no-untyped-def]
    """In place: scores become weights, and gradients of weights become gradients of scores."""
    for a in range(r):
        seen = max(0, min(c, low + a - left + 1))
        x, g = scores[a * c : (a + 1) * c], grads[a * c : (a + 1) * c]
        if biased:
            t, p = of_time[a * c : (a + 1) * c], of_place[a * c : (a + 1) * c]
            for z in range(seen):
                x[z] += t[z] + p[z]
        for z in range(seen):
            s = x[z]
            q = sigmoid(s)
            silu = s * q
            x[z] = scale * silu
            g[z] = g[z] * (scale * (q + (silu - silu * q)))
        x[seen:] = 0
        g[seen:] = 0


@numba.njit(nogil=True, error_model="numpy")
def _copy(source, first, count, to):  # type: ignore[no-untyped-def]
    """to[i] = source[first + i], for `count` rows of the narrower one's width."""
    width = min(source.shape[1], to.shape[1])
    for i in range(count):
        x, y = source[first + i], to[i]
        for j in range(width):
            y[j] = x[j]


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def attend(gemm, vectors, starts, events, mode, heads, scale, rows, columns, room, out):  # type: ignore[no-untyped-def]
    """Fills `out`, channels side by side.  vectors: q, k and v; starts: of queries, of keys.

    A library's products may depend on where a matrix begins in memory.  So a tile's queries, keys, values and sums are
    copied to and from the same places of `room`, whatever came before them: the same tile gives the same bits.
    room: [3, rows * columns], [rows, step], [columns, step] twice, [rows, channels * step], with step >= the width of v.
    """
    q, k, v = vectors
    query_starts, key_starts = starts
    times, thresholds, kind, by_place, by_time = events
    pairs, queries, keys, values, sums = room
    d, size = v.shape[1], v.itemsize
    w, step, wide = d // heads, values.shape[1], sums.shape[1]
    zero = scale * 0
    one = zero + 1
    products = gemm, np.empty(CELLS, np.int64), np.empty(2, v.dtype)
    prepare(products)
    scores, of_time, of_place = pairs[0], pairs[1], pairs[2]
    at_scores, at_time, at_place = scores.ctypes.data, of_time.ctypes.data, of_place.ctypes.data
    at_q, at_k, at_v, to = queries.ctypes.data, keys.ctypes.data, values.ctypes.data, sums.ctypes.data
    for b in range(key_starts.shape[0] - 1):
        n = key_starts[b + 1] - key_starts[b]
        low = n - (query_starts[b + 1] - query_starts[b])
        shift = query_starts[b] - low
        own = times[key_starts[b] + b : key_starts[b + 1] + b + 1]
        history = own, in_order(own), thresholds, kind, by_place, by_time
        while low < n:
            high = min(n, (low // rows + 1) * rows)
            r = high - low
            if mode != TWO_CHANNELS:
                _copy(q, shift + low, r, queries)
            for left in range(0, high, columns):
                c = min(columns, high - left)
                add = one if left else zero
                _copy(v, key_starts[b] + left, c, values)
                biases(low, left, r, c, history, of_time, of_place)
                if mode != TWO_CHANNELS:
                    _copy(k, key_starts[b] + left, c, keys)
                    for h in range(heads):
                        head = size * h * w
                        multiply(
                            products, False, True, r, c, w, at_q + head, step, at_k + head, step, zero, at_scores, c
                        )
                        weigh(low, left, r, c, scores, of_time, of_place, mode == SCORE_BIAS, scale)
                        multiply(products, False, False, r, w, c, at_scores, c, at_v + head, step, add, to + head, wide)
                if mode != SCORE_BIAS:
                    channel = to + (size * step if mode == THREE_CHANNELS else 0)
                    multiply(products, False, False, r, d, c, at_time, c, at_v, step, add, channel, wide)
                    multiply(products, False, False, r, d, c, at_place, c, at_v, step, add, channel + size * step, wide)
            for channel in range(out.shape[1] // d):
                _copy(
                    sums[:, channel * step : channel * step + d], 0, r, out[shift + low : shift + high, channel * d :]
                )
            low = high


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def attend_backward(gemm, vectors, starts, events, mode, heads, scale, rows, columns, room, grad, passed):  # type: ignore[no-untyped-def]
    """Fills the gradient of q and adds to those of k, v, by_place and by_time.  room [5, rows * columns]."""
    q, k, v = vectors
    query_starts, key_starts = starts
    times, thresholds, kind, by_place, by_time = events
    q_grad, k_grad, v_grad, place_grad, time_grad = passed
    d, wide, size = v.shape[1], grad.shape[1], v.itemsize
    w = d // heads
    zero = scale * 0
    one = zero + 1
    products = gemm, np.empty(CELLS, np.int64), np.empty(2, v.dtype)
    prepare(products)
    scores, of_time, of_place, grads, sums = room[0], room[1], room[2], room[3], room[4]
    few = np.empty((4, rows + columns), v.dtype)
    at_scores, at_time, at_place = scores.ctypes.data, of_time.ctypes.data, of_place.ctypes.data
    at_grads, at_sums = grads.ctypes.data, sums.ctypes.data
    for b in range(key_starts.shape[0] - 1):
        n = key_starts[b + 1] - key_starts[b]
        low = n - (query_starts[b + 1] - query_starts[b])
        shift = query_starts[b] - low
        own = times[key_starts[b] + b : key_starts[b + 1] + b + 1]
        history = own, in_order(own), thresholds, kind, by_place, by_time
        while low < n:
            high = min(n, (low // rows + 1) * rows)
            r = high - low
            from_q = size * d * (shift + low)
            at_q, to_q = q.ctypes.data + from_q, q_grad.ctypes.data + from_q
            at_g = grad.ctypes.data + size * wide * (shift + low)
            for left in range(0, high, columns):
                c = min(columns, high - left)
                add = one if left else zero
                from_k = size * d * (key_starts[b] + left)
                at_k, at_v = k.ctypes.data + from_k, v.ctypes.data + from_k
                to_k, to_v = k_grad.ctypes.data + from_k, v_grad.ctypes.data + from_k
                biases(low, left, r, c, history, of_time, of_place)
                if mode != TWO_CHANNELS:
                    for h in range(heads):
                        head = size * h * w
                        multiply(products, False, True, r, c, w, at_q + head, d, at_k + head, d, zero, at_scores, c)
                        multiply(products, False, True, r, c, w, at_g + head, wide, at_v + head, d, zero, at_grads, c)
                        weigh_backward(low, left, r, c, scores, grads, of_time, of_place, mode == SCORE_BIAS, scale)
                        multiply(products, True, False, c, w, r, at_scores, c, at_g + head, wide, one, to_v + head, d)
                        multiply(products, False, False, r, w, c, at_grads, c, at_k + head, d, add, to_q + head, d)
                        multiply(products, True, False, c, w, r, at_grads, c, at_q + head, d, one, to_k + head, d)
                        if mode == SCORE_BIAS and h:
                            for z in range(r * c):
                                sums[z] += grads[z]
                        elif mode == SCORE_BIAS:
                            sums[: r * c] = grads[: r * c]
                if mode == SCORE_BIAS:
                    biases_backward(low, left, r, c, history, sums, sums, few, place_grad, time_grad)
                else:
                    of = at_g + (size * d if mode == THREE_CHANNELS else 0)
                    multiply(products, True, False, c, d, r, at_time, c, of, wide, one, to_v, d)
                    multiply(products, True, False, c, d, r, at_place, c, of + size * d, wide, one, to_v, d)
                    multiply(products, False, True, r, c, d, of, wide, at_v, d, zero, at_grads, c)
                    multiply(products, False, True, r, c, d, of + size * d, wide, at_v, d, zero, at_sums, c)
                    biases_backward(low, left, r, c, history, grads, sums, few, place_grad, time_grad)
            low = high
