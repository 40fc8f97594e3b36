"""Numba kernels of jagged attention on the host, without the GIL: tile by tile over each sample's own pairs of places.

Tokens lie one after the other without padding.  Sample b has the keys and values of tokens key_starts[b] to
key_starts[b + 1], and the queries of its last places, query_starts[b] to query_starts[b + 1]: all of them in training,
fewer where keys and values of earlier places come from a cache.  `times` has one more entry a sample than it has keys:
the time of what follows.

A tile is `rows` places that look back by `columns` places that they look at.  Tiles begin at multiples of their size, so a
pair of places is in the same tile whatever the number of queries.  Scores of a tile are made, weighed and multiplied while
they are in cache.  The backward pass makes them again; nothing of the size of all pairs is ever kept.

Products are A B of matrices as they lie in memory.  So what has to be multiplied transposed is copied transposed first, once
for a history or for its `rows` places, and the gradients of keys and values are summed transposed.  Copies begin at the same
places of a room of their own, whatever lies before a history: the same tile gives the same bits, also of a library whose
products depend on where a matrix begins in memory.  Tiles at the end of a history are filled up with zeros to a multiple of
`grain`, so that there are few shapes of products: some are made for their shape at run time.
"""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.ops.attention_room import (
    copy_out,
    copy_rows,
    copy_tiles_back,
    copy_tiles_transposed,
    copy_transposed,
    filled_up,
    room_step,
)
from nestpipe.ops.event_kernels import biases, biases_backward, in_order
from nestpipe.ops.gemm import multiply, prepared
from nestpipe.ops.register_math import sigmoid

SCORE_BIAS, THREE_CHANNELS, TWO_CHANNELS = 0, 1, 2
"""What the biases of a pair do: they are added to its score (HSTU), or are weights of channels of their own, beside the
scores' channel (FuXi-alpha) or alone (FuXi-beta and gamma)."""


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def weigh(low, left, r, c, scores, bias, biased, scale):  # type: ignore[no-untyped-def]
    """In place: scale * silu(score + bias) where a place looks back, 0 elsewhere."""
    for a in range(r):
        seen = max(0, min(c, low + a - left + 1))
        x = scores[a * c : (a + 1) * c]
        if biased:
            b = bias[a * c : (a + 1) * c]
            for z in range(seen):
                s = x[z] + b[z]
                x[z] = scale * (s * sigmoid(s))
        else:
            for z in range(seen):
                x[z] = scale * (x[z] * sigmoid(x[z]))
        x[seen:] = 0


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def weigh_backward(low, left, r, c, scores, grads, bias, biased, scale, sums, first):  # type: ignore[no-untyped-def]
    """In place: scores become weights, and gradients of weights become gradients of scores.

    Biased: the latter are added to `sums`, too; of the `first` head, they are what `sums` begins with.
    """
    for a in range(r):
        seen = max(0, min(c, low + a - left + 1))
        x, g = scores[a * c : (a + 1) * c], grads[a * c : (a + 1) * c]
        if biased:
            b, total = bias[a * c : (a + 1) * c], sums[a * c : (a + 1) * c]
            if first:
                total[:seen] = 0
            for z in range(seen):
                s = x[z] + b[z]
                q = sigmoid(s)
                silu = s * q
                x[z] = scale * silu
                g[z] = g[z] * (scale * (q + (silu - silu * q)))
                total[z] += g[z]
        else:
            for z in range(seen):
                s = x[z]
                q = sigmoid(s)
                silu = s * q
                x[z] = scale * silu
                g[z] = g[z] * (scale * (q + (silu - silu * q)))
        x[seen:] = 0
        g[seen:] = 0


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _tile_biases(low, left, r, tall, c, history, joined, pairs):  # type: ignore[no-untyped-def]
    """Fills `pairs` [2, tall, c] by time and by place, with zeros after row r.  `joined`: [tall, c], both added up."""
    of_time, of_place = pairs[: tall * c], pairs[tall * c : 2 * tall * c]
    biases(low, left, r, c, history, of_time, of_place)
    if joined:
        for z in range(r * c):
            of_time[z] += of_place[z]
    else:
        of_time[r * c :] = 0
        of_place[r * c :] = 0


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def attend(gemm, vectors, starts, events, mode, heads, scale, sizes, room, out):  # type: ignore[no-untyped-def]
    """Fills `out`, channels side by side.  vectors: q, k and v; starts: of queries, of keys; sizes: rows, columns and grain.
    `room` is made by `make_room`."""
    q, k, v = vectors
    query_starts, key_starts = starts
    times, thresholds, kind, by_place, by_time = events
    rows, columns, grain = sizes
    d, size = v.shape[1], v.itemsize
    w, step = d // heads, room_step(d)
    keys_across, values, pairs, scores, queries, sums = room
    at_ka, at_v, at_pairs = keys_across.ctypes.data, values.ctypes.data, pairs.ctypes.data
    at_scores, at_q, to = scores.ctypes.data, queries.ctypes.data, sums.ctypes.data
    products = prepared(gemm, v)
    for b in range(key_starts.shape[0] - 1):
        n = key_starts[b + 1] - key_starts[b]
        low = n - (query_starts[b + 1] - query_starts[b])
        shift = query_starts[b] - low
        own = times[key_starts[b] + b : key_starts[b + 1] + b + 1]
        history = own, in_order(own), thresholds, kind, by_place, by_time
        if low < n:
            copy_rows(v, key_starts[b], n, 0, d, filled_up(n, grain), values, 0, step)
            if mode != TWO_CHANNELS:
                copy_tiles_transposed(k, key_starts[b], n, columns, grain, keys_across, step)
        while low < n:
            high = min(n, (low // rows + 1) * rows)
            r = high - low
            tall = filled_up(r, grain)
            if mode != TWO_CHANNELS:
                copy_rows(q, shift + low, r, 0, d, tall, queries, 0, step)
            for left in range(0, high, columns):
                c = min(columns, filled_up(high, grain) - left)
                add = left > 0
                from_k, from_v = at_ka + size * left * step, at_v + size * left * step
                _tile_biases(low, left, r, tall, c, history, mode == SCORE_BIAS, pairs)
                if mode != TWO_CHANNELS:
                    for h in range(heads):
                        head, over = size * h * w, size * h * w * columns
                        multiply(products, tall, c, w, at_q + head, step, from_k + over, columns, False, at_scores, c)
                        weigh(low, left, r, c, scores, pairs, mode == SCORE_BIAS, scale)
                        scores[r * c : tall * c] = 0
                        multiply(products, tall, w, c, at_scores, c, from_v + head, step, add, to + head, step)
                if mode != SCORE_BIAS:
                    both = to + size * rows * step
                    multiply(products, 2 * tall, d, c, at_pairs, c, from_v, step, add, both, step)
            place = 0
            if mode != TWO_CHANNELS:
                copy_out(sums, 0, step, r, out, shift + low, place, d)
                place += d
            if mode != SCORE_BIAS:
                copy_out(sums, rows * step, step, r, out, shift + low, place, d)
                copy_out(sums, (rows + tall) * step, step, r, out, shift + low, place + d, d)
            low = high


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def attend_backward(gemm, vectors, starts, events, mode, heads, scale, sizes, room, grad, passed):  # type: ignore[no-untyped-def]
    """Fills the gradients of q, k and v and adds to those of by_place and by_time."""
    q, k, v = vectors
    query_starts, key_starts = starts
    times, thresholds, kind, by_place, by_time = events
    q_grad, k_grad, v_grad, place_grad, time_grad = passed
    rows, columns, grain = sizes
    d, size = v.shape[1], v.itemsize
    w, step = d // heads, room_step(d)
    keys, keys_across, values_across, by_keys, by_values, pairs, scores, grads, by_pairs = room[:9]
    queries, queries_across, by_queries, of_scores, of_scores_across, of_pairs, of_pairs_across = room[9:]
    at_k, at_ka, at_va = keys.ctypes.data, keys_across.ctypes.data, values_across.ctypes.data
    to_k, to_v, to_q = by_keys.ctypes.data, by_values.ctypes.data, by_queries.ctypes.data
    at_pairs, at_by_pairs = pairs.ctypes.data, by_pairs.ctypes.data
    at_scores, at_grads = scores.ctypes.data, grads.ctypes.data
    at_q, at_qa = queries.ctypes.data, queries_across.ctypes.data
    at_g, at_ga = of_scores.ctypes.data, of_scores_across.ctypes.data
    at_b, at_ba = of_pairs.ctypes.data, of_pairs_across.ctypes.data
    products = prepared(gemm, v)
    few = np.empty((4, rows + columns), v.dtype)
    start = d if mode == THREE_CHANNELS else 0
    for b in range(key_starts.shape[0] - 1):
        first, n = key_starts[b], key_starts[b + 1] - key_starts[b]
        low = n - (query_starts[b + 1] - query_starts[b])
        shift = query_starts[b] - low
        own = times[first + b : key_starts[b + 1] + b + 1]
        history = own, in_order(own), thresholds, kind, by_place, by_time
        copy_tiles_transposed(v, first, n, columns, grain, values_across, step)
        by_values[: filled_up(n, columns) * step] = 0
        if mode != TWO_CHANNELS:
            copy_rows(k, first, n, 0, d, filled_up(n, grain), keys, 0, step)
            copy_tiles_transposed(k, first, n, columns, grain, keys_across, step)
            by_keys[: filled_up(n, columns) * step] = 0
        while low < n:
            high = min(n, (low // rows + 1) * rows)
            r = high - low
            tall = filled_up(r, grain)
            if mode != TWO_CHANNELS:
                copy_rows(q, shift + low, r, 0, d, tall, queries, 0, step)
                copy_rows(grad, shift + low, r, 0, d, tall, of_scores, 0, step)
                copy_transposed(q, shift + low, r, 0, d, tall, queries_across, 0, rows)
                copy_transposed(grad, shift + low, r, 0, d, tall, of_scores_across, 0, rows)
            if mode != SCORE_BIAS:
                for channel in range(2):
                    at = start + channel * d
                    copy_rows(grad, shift + low, r, at, d, tall, of_pairs, channel * tall * step, step)
                    copy_transposed(grad, shift + low, r, at, d, tall, of_pairs_across, channel * tall, 2 * rows)
            for left in range(0, high, columns):
                c = min(columns, filled_up(high, grain) - left)
                add = left > 0
                here = size * left * step
                _tile_biases(low, left, r, tall, c, history, mode == SCORE_BIAS, pairs)
                if mode != TWO_CHANNELS:
                    for h in range(heads):
                        head, over, up = size * h * w, here + size * h * w * columns, size * h * w * rows
                        multiply(products, tall, c, w, at_q + head, step, at_ka + over, columns, False, at_scores, c)
                        multiply(products, tall, c, w, at_g + head, step, at_va + over, columns, False, at_grads, c)
                        weigh_backward(
                            low, left, r, c, scores, grads, pairs, mode == SCORE_BIAS, scale, by_pairs, h == 0
                        )
                        scores[r * c : tall * c] = 0
                        grads[r * c : tall * c] = 0
                        multiply(products, w, c, tall, at_ga + up, rows, at_scores, c, True, to_v + over, columns)
                        multiply(products, tall, w, c, at_grads, c, at_k + here + head, step, add, to_q + head, step)
                        multiply(products, w, c, tall, at_qa + up, rows, at_grads, c, True, to_k + over, columns)
                if mode == SCORE_BIAS:
                    biases_backward(low, left, r, c, history, by_pairs, by_pairs, few, place_grad, time_grad)
                else:
                    multiply(products, d, c, 2 * tall, at_ba, 2 * rows, at_pairs, c, True, to_v + here, columns)
                    multiply(products, 2 * tall, c, d, at_b, step, at_va + here, columns, False, at_by_pairs, c)
                    of_time, of_place = by_pairs[: tall * c], by_pairs[tall * c :]
                    biases_backward(low, left, r, c, history, of_time, of_place, few, place_grad, time_grad)
            if mode != TWO_CHANNELS:
                copy_out(by_queries, 0, step, r, q_grad, shift + low, 0, d)
            low = high
        copy_tiles_back(by_values, n, columns, step, v_grad, first)
        if mode != TWO_CHANNELS:
            copy_tiles_back(by_keys, n, columns, step, k_grad, first)
