"""Numba kernels of candidates that look at a history, on the host and without the GIL.

Candidates of request b are rows candidate_starts[b] to candidate_starts[b + 1]; its history has the keys and values
key_starts[b] to key_starts[b + 1], n of them.  All candidates stand at place n and at the request's time, so what pairs weigh
by time and by place is one vector of n + 1 numbers a request.  The last one is of a candidate and itself.

Scores of a tile are made, weighed and multiplied while they are in cache, and made again in the backward pass; nothing of the
size of all pairs is kept.  Every matrix is copied to a fixed place first, as products may depend on where one begins.
"""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.ops.attention_kernels import SCORE_BIAS, THREE_CHANNELS, TWO_CHANNELS
from nestpipe.ops.event_kernels import biases, biases_backward, in_order
from nestpipe.ops.gemm import multiply, prepared
from nestpipe.ops.register_math import sigmoid
from nestpipe.ops.tile_copies import copy_transposed


@numba.njit(nogil=True, error_model="numpy")
def _request(b, starts, events):  # type: ignore[no-untyped-def]
    """Events as a place after the history sees them: the request's time stands for the candidate's and for what follows."""
    times, thresholds, kind, by_place, by_time = events
    first, last = starts[1][b], starts[1][b + 1]
    own = np.empty(last - first + 2, np.int64)
    own[:-1] = times[first + b : last + b + 1]
    own[-1] = own[-2]
    return own, in_order(own), thresholds, kind, by_place, by_time


@numba.njit(nogil=True, error_model="numpy")
def _copy(source, first, count, to):  # type: ignore[no-untyped-def]
    for i in range(count):
        x, y = source[first + i], to[i]
        for j in range(source.shape[1]):
            y[j] = x[j]


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _weigh(scores, r, c, bias, scale):  # type: ignore[no-untyped-def]
    """In place: scale * silu(score + bias of its column)."""
    for a in range(r):
        x = scores[a, :c]
        for z in range(c):
            s = x[z] + bias[z]
            x[z] = scale * (s * sigmoid(s))


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _weigh_backward(scores, grads, r, c, bias, scale, by_bias):  # type: ignore[no-untyped-def]
    """In place: scores become weights, gradients of weights those of scores; the latter are added up by column."""
    for a in range(r):
        x, g = scores[a, :c], grads[a, :c]
        for z in range(c):
            s = x[z] + bias[z]
            q = sigmoid(s)
            silu = s * q
            x[z] = scale * silu
            g[z] = g[z] * (scale * (q + (silu - silu * q)))
            by_bias[z] += g[z]


@numba.njit(nogil=True, error_model="numpy", fastmath={"reassoc", "contract"})
def _dot(a, b):  # type: ignore[no-untyped-def]
    total = a.dtype.type(0)
    for j in range(a.shape[0]):
        total += a[j] * b[j]
    return total


@numba.njit(nogil=True, error_model="numpy", fastmath={"contract"})
def _add_scaled(to, scale, x):  # type: ignore[no-untyped-def]
    for j in range(x.shape[0]):
        to[j] += scale * x[j]


@numba.njit(nogil=True, error_model="numpy")
def _add(to, x):  # type: ignore[no-untyped-def]
    for j in range(x.shape[0]):
        to[j] += x[j]


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def attend_candidates(gemm, vectors, starts, events, mode, heads, scale, room, out):  # type: ignore[no-untyped-def]
    """Fills `out`, channels side by side.  vectors: q, k and v of candidates, k and v of histories.

    room: scores [rows, columns], queries and sums [rows, step], values [columns, step], keys [step, columns].
    """
    q, own_k, own_v, k, v = vectors
    scores, queries, sums, values, keys = room
    d, size = v.shape[1], v.itemsize
    w, step = d // heads, values.shape[1]
    rows, columns = scores.shape
    products = prepared(gemm, v)
    at_scores, at_q, at_k = scores.ctypes.data, queries.ctypes.data, keys.ctypes.data
    at_v, to = values.ctypes.data, sums.ctypes.data
    for b in range(starts[0].shape[0] - 1):
        begin, count = starts[0][b], starts[0][b + 1] - starts[0][b]
        first, n = starts[1][b], starts[1][b + 1] - starts[1][b]
        if count == 0:
            continue
        of_time, of_place = np.empty(n + 1, v.dtype), np.empty(n + 1, v.dtype)
        biases(n, 0, 1, n + 1, _request(b, starts, events), of_time, of_place)
        bias = of_time + of_place if mode == SCORE_BIAS else np.zeros(n + 1, v.dtype)
        if mode != TWO_CHANNELS:
            for low in range(0, count, rows):
                r = min(rows, count - low)
                _copy(q, begin + low, r, queries)
                sums[:r] = 0
                for left in range(0, n, columns):
                    c = min(columns, n - left)
                    _copy(v, first + left, c, values)
                    copy_transposed(k, first + left, c, keys)
                    for h in range(heads):
                        head = size * h * w
                        multiply(
                            products,
                            r,
                            c,
                            w,
                            at_q + head,
                            step,
                            at_k + head * columns,
                            columns,
                            False,
                            at_scores,
                            columns,
                        )
                        _weigh(scores, r, c, bias[left:], scale)
                        multiply(products, r, w, c, at_scores, columns, at_v + head, step, True, to + head, step)
                for a in range(r):
                    i = begin + low + a
                    for h in range(heads):
                        span = slice(h * w, (h + 1) * w)
                        s = _dot(q[i, span], own_k[i, span]) + bias[n]
                        _add_scaled(sums[a, span], scale * (s * sigmoid(s)), own_v[i, span])
                    out[i, :d] = sums[a, :d]
        if mode != SCORE_BIAS:
            channel = d if mode == THREE_CHANNELS else 0
            shared = np.zeros((2, d), v.dtype)
            for z in range(n):
                _add_scaled(shared[0], of_time[z], v[first + z])
                _add_scaled(shared[1], of_place[z], v[first + z])
            for i in range(begin, begin + count):
                for j in range(d):
                    out[i, channel + j] = shared[0, j] + of_time[n] * own_v[i, j]
                    out[i, channel + d + j] = shared[1, j] + of_place[n] * own_v[i, j]


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def attend_candidates_backward(gemm, vectors, starts, events, mode, heads, scale, room, grad, passed):  # type: ignore[no-untyped-def]
    """Adds to the gradients of all `vectors`, of by_place and of by_time, which are 0 before.

    room: scores, grads [rows, columns], turned [columns, rows], queries, outs, sums [rows, step], values, sides [columns, step],
    turned_values, turned_keys [step, columns].
    """
    q, own_k, own_v, k, v = vectors
    q_grad, own_k_grad, own_v_grad, k_grad, v_grad, place_grad, time_grad = passed
    scores, grads, turned, queries, outs, sums, values, sides, turned_values, turned_keys = room
    d, size = v.shape[1], v.itemsize
    w, step = d // heads, values.shape[1]
    rows, columns = scores.shape
    products = prepared(gemm, v)
    at_scores, at_grads, at_turned = scores.ctypes.data, grads.ctypes.data, turned.ctypes.data
    at_q, at_g, at_sums = queries.ctypes.data, outs.ctypes.data, sums.ctypes.data
    at_v, at_sides = values.ctypes.data, sides.ctypes.data
    at_vt, at_kt = turned_values.ctypes.data, turned_keys.ctypes.data
    for b in range(starts[0].shape[0] - 1):
        begin, count = starts[0][b], starts[0][b + 1] - starts[0][b]
        first, n = starts[1][b], starts[1][b + 1] - starts[1][b]
        if count == 0:
            continue
        request = _request(b, starts, events)
        of_time, of_place = np.empty(n + 1, v.dtype), np.empty(n + 1, v.dtype)
        biases(n, 0, 1, n + 1, request, of_time, of_place)
        bias = of_time + of_place if mode == SCORE_BIAS else np.zeros(n + 1, v.dtype)
        by_t, by_p = np.zeros(n + 1, v.dtype), np.zeros(n + 1, v.dtype)
        if mode != TWO_CHANNELS:
            for low in range(0, count, rows):
                r = min(rows, count - low)
                _copy(q, begin + low, r, queries)
                _copy(grad[:, :d], begin + low, r, outs)
                sums[:r] = 0
                for left in range(0, n, columns):
                    c = min(columns, n - left)
                    copy_transposed(k, first + left, c, turned_keys)
                    copy_transposed(v, first + left, c, turned_values)
                    _copy(k, first + left, c, values)
                    for h in range(heads):
                        head = size * h * w
                        tall = head * columns
                        multiply(products, r, c, w, at_q + head, step, at_kt + tall, columns, False, at_scores, columns)
                        multiply(products, r, c, w, at_g + head, step, at_vt + tall, columns, False, at_grads, columns)
                        _weigh_backward(scores, grads, r, c, bias[left:], scale, by_t[left:])
                        copy_transposed(scores[:, :c], 0, r, turned)
                        multiply(products, c, w, r, at_turned, rows, at_g + head, step, False, at_sides + head, step)
                        for i in range(c):
                            _add(v_grad[first + left + i, h * w : (h + 1) * w], sides[i, h * w : (h + 1) * w])
                        multiply(products, r, w, c, at_grads, columns, at_v + head, step, True, at_sums + head, step)
                        copy_transposed(grads[:, :c], 0, r, turned)
                        multiply(products, c, w, r, at_turned, rows, at_q + head, step, False, at_sides + head, step)
                        for i in range(c):
                            _add(k_grad[first + left + i, h * w : (h + 1) * w], sides[i, h * w : (h + 1) * w])
                for a in range(r):
                    i = begin + low + a
                    q_grad[i] = sums[a, :d]
                    for h in range(heads):
                        span = slice(h * w, (h + 1) * w)
                        s = _dot(q[i, span], own_k[i, span]) + bias[n]
                        near = sigmoid(s)
                        silu = s * near
                        by_weight = _dot(grad[i, span], own_v[i, span])
                        by_score = by_weight * (scale * (near + (silu - silu * near)))
                        _add_scaled(own_v_grad[i, span], scale * silu, grad[i, span])
                        _add_scaled(q_grad[i, span], by_score, own_k[i, span])
                        _add_scaled(own_k_grad[i, span], by_score, q[i, span])
                        by_t[n] += by_score
        if mode == SCORE_BIAS:
            by_p[:] = by_t
        else:
            by_t[:] = 0
            channel = d if mode == THREE_CHANNELS else 0
            shared = np.zeros((2, d), v.dtype)
            for i in range(begin, begin + count):
                t, p = grad[i, channel : channel + d], grad[i, channel + d :]
                for j in range(d):
                    shared[0, j] += t[j]
                    shared[1, j] += p[j]
                    own_v_grad[i, j] += of_time[n] * t[j] + of_place[n] * p[j]
                by_t[n] += _dot(t, own_v[i])
                by_p[n] += _dot(p, own_v[i])
            for z in range(n):
                _add_scaled(v_grad[first + z], of_time[z], shared[0])
                _add_scaled(v_grad[first + z], of_place[z], shared[1])
                by_t[z] = _dot(shared[0], v[first + z])
                by_p[z] = _dot(shared[1], v[first + z])
        few = np.empty((4, n + 2), v.dtype)
        biases_backward(n, 0, 1, n + 1, request, by_t, by_p, few, place_grad, time_grad)
