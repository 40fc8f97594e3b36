"""Numba kernels of HSTU's attention on the host, without the GIL.

Tokens lie one after the other without padding; sample b has those from offsets[b] to offsets[b + 1].  A row of `mixed`
is a token's u, v, q and k, heads side by side.  Matrix products need padding: q, k and v are [B * H, n, w].  Their
results are *blocked*: for every block of `size` places in turn a matrix [B * H, places, w], so that a block is the
contiguous result of a product.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload, register_jitable

# A sigmoid that runs in vector registers.  `math.exp` is a call per number, which keeps a loop from being vectorised.
# It is in this file because numba's cache only notices changes in the file of a kernel.

_LARGEST = np.float32(88.0)
_LOG2_E = np.float32(math.log2(math.e))
_LN2_HIGH = np.float32(0.693359375)
"""ln 2 in few bits, so that a small whole number times it is exact.  _LN2_LOW is the rest."""
_LN2_LOW = np.float32(math.log(2) - 0.693359375)
_ROUND = np.float32(1.5 * 2**23)
"""A float32 this large has no bits below one: adding it rounds to a whole number, subtracting it gives that back."""
_C0, _C1, _C2, _C3, _C4 = (
    np.float32(c) for c in (0.5, 0.16666577003160277, 0.041666464976110214, 0.008363175565467586, 0.0013933643523636517)
)
"""Polynomial for (exp(r) - 1 - r) / r^2, |r| <= ln 2 / 2, least squares at Chebyshev points: exp to 1e-8."""
_ONE, _BIAS, _MANTISSA = np.float32(1), np.int32(127), np.int32(23)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) of a float32 (to 2 units in the last place) or a float64.  For kernels without `reassoc`."""
    raise NotImplementedError("for numba kernels")


@register_jitable
def _of_float32(x):  # type: ignore[no-untyped-def]
    y = -x
    y = y if y < _LARGEST else _LARGEST  # a NaN becomes _LARGEST, but x * sigmoid(x) is still NaN
    y = y if y > -_LARGEST else -_LARGEST
    whole = (y * _LOG2_E + _ROUND) - _ROUND
    rest = (y - whole * _LN2_HIGH) - whole * _LN2_LOW
    tail = (((_C4 * rest + _C3) * rest + _C2) * rest + _C1) * rest + _C0
    power = np.int32((np.int32(whole) + _BIAS) << _MANTISSA).view(np.float32)
    return _ONE / (_ONE + (tail * rest * rest + rest + _ONE) * power)


@register_jitable
def _of_float64(x):  # type: ignore[no-untyped-def]
    return 1.0 / (1.0 + math.exp(-x))


@overload(sigmoid, inline="always")
def _sigmoid(x):  # type: ignore[no-untyped-def]
    if x == types.float32:
        return lambda x: _of_float32(x)
    return lambda x: _of_float64(x)


# Kernels

_EPS = 1e-6


@register_jitable
def _blocked(i, n, rows, size):  # type: ignore[no-untyped-def]
    """Of place i: the first row of its block, the places of each matrix in that block, and its place in the block."""
    low = i // size * size
    return low * rows, min(size, n - low), i - low


@register_jitable
def _slope(x, s):  # type: ignore[no-untyped-def]
    """The derivative of silu at x, whose sigmoid is s.  (An integer constant would turn it into a float64.)"""
    silu = x * s
    return s + (silu - silu * s)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def activate(mixed, offsets, qkv):  # type: ignore[no-untyped-def]
    """qkv[part, b * H + h, i] = silu of a token's values, queries or keys; zeros past the end of a sample."""
    rows, width = qkv.shape[1], qkv.shape[3]
    heads = rows // (offsets.shape[0] - 1)
    for b in range(offsets.shape[0] - 1):
        length = offsets[b + 1] - offsets[b]
        for part in range(3):
            for h in range(heads):
                start = ((part + 1) * heads + h) * width
                for i in range(length):
                    of = mixed[offsets[b] + i, start : start + width]
                    to = qkv[part, b * heads + h, i]
                    for d in range(width):
                        to[d] = of[d] * sigmoid(of[d])
                qkv[part, b * heads + h, length:] = 0


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def activate_backward(mixed, offsets, heads, size, n, by_values, by_queries, by_keys, out):  # type: ignore[no-untyped-def]
    """Fills the gradients of a token's values, queries and keys in `out` from the blocked gradients after silu."""
    width = mixed.shape[1] // (4 * heads)
    rows = heads * (offsets.shape[0] - 1)
    for b in range(offsets.shape[0] - 1):
        for i in range(offsets[b + 1] - offsets[b]):
            low, places, at = _blocked(i, n, rows, size)
            for h in range(heads):
                row = low + (b * heads + h) * places + at
                for part in range(3):
                    grads = by_values if part == 0 else (by_queries if part == 1 else by_keys)
                    start = ((part + 1) * heads + h) * width
                    of = mixed[offsets[b] + i, start : start + width]
                    to = out[offsets[b] + i, start : start + width]
                    grad = grads[row]
                    for d in range(width):
                        s = sigmoid(of[d])
                        to[d] = grad[d] * _slope(of[d], s)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def weigh(scores, low, by_place, by_time, bucket, offsets, scale, weights, slopes):  # type: ignore[no-untyped-def]
    """For the places from `low` on: weights = scale * silu(scores + bias) where a token looks back, 0 elsewhere.

    `scores` is [B * H, places, seen], `weights` [B * H, n, n].  `slopes`, the derivative of weights, has the same
    shape, or is empty where no gradient is needed.
    """
    rows, places, seen = scores.shape
    heads = rows // (offsets.shape[0] - 1)
    centre = (by_place.shape[0] - 1) // 2
    bias = np.empty(seen, scores.dtype)
    with_slopes = slopes.shape[0] > 0
    for b in range(offsets.shape[0] - 1):
        length = offsets[b + 1] - offsets[b]
        for at in range(places):
            i = low + at
            back = i + 1 if i < length else 0
            for j in range(back):
                bias[j] = by_time[bucket[b, i, j]]
            near = by_place[centre - i : centre - i + back]
            for h in range(heads):
                score, weight = scores[b * heads + h, at], weights[b * heads + h, i]
                if with_slopes:
                    slope = slopes[b * heads + h, i]
                    for j in range(back):
                        x = score[j] + (bias[j] + near[j])
                        s = sigmoid(x)
                        weight[j] = scale * (x * s)
                        slope[j] = scale * _slope(x, s)
                    slope[back:seen] = 0
                else:
                    for j in range(back):
                        x = score[j] + (bias[j] + near[j])
                        weight[j] = scale * (x * sigmoid(x))
                weight[back:seen] = 0


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def weigh_backward(by_weights, low, slopes, bucket, offsets, by_scores, by_place, by_time):  # type: ignore[no-untyped-def]
    """For the places from `low` on: by_scores = by_weights * slopes, which is also added to the biases' gradients.
    Those are float64, because millions of terms go into a hundred numbers."""
    rows, places, seen = by_weights.shape
    heads = rows // (offsets.shape[0] - 1)
    centre = (by_place.shape[0] - 1) // 2
    sums = np.empty(seen, np.float64)
    for b in range(offsets.shape[0] - 1):
        length = offsets[b + 1] - offsets[b]
        for at in range(places):
            i = low + at
            back = i + 1 if i < length else 0
            sums[:back] = 0
            for h in range(heads):
                grad, slope, to = by_weights[b * heads + h, at], slopes[b * heads + h, i], by_scores[b * heads + h, i]
                for j in range(back):
                    passed = grad[j] * slope[j]
                    to[j] = passed
                    sums[j] += passed
                to[back:seen] = 0
            near = by_place[centre - i : centre - i + back]
            for j in range(back):
                near[j] += sums[j]
            for j in range(back):
                by_time[bucket[b, i, j]] += sums[j]


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc"})
def _mean_and_scale(values):  # type: ignore[no-untyped-def]
    """The mean of a row and one over its standard deviation, as layer norm needs them."""
    count = values.shape[0]
    total = values.dtype.type(0)
    for d in range(count):
        total += values[d]
    mean = total / values.dtype.type(count)
    total = values.dtype.type(0)
    for d in range(count):
        total += (values[d] - mean) * (values[d] - mean)
    return mean, values.dtype.type(1 / np.sqrt(total / count + _EPS))


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def gate(attended, mixed, offsets, n, size, out):  # type: ignore[no-untyped-def]
    """out = silu(u) * norm(a), token by token; `attended` is blocked."""
    inner = out.shape[1]
    width = attended.shape[1]
    heads = inner // width
    rows = heads * (offsets.shape[0] - 1)
    token = np.empty(inner, out.dtype)
    for b in range(offsets.shape[0] - 1):
        for i in range(offsets[b + 1] - offsets[b]):
            low, places, at = _blocked(i, n, rows, size)
            for h in range(heads):
                token[h * width : (h + 1) * width] = attended[low + (b * heads + h) * places + at]
            mean, scale = _mean_and_scale(token)
            u, to = mixed[offsets[b] + i], out[offsets[b] + i]
            for d in range(inner):
                to[d] = u[d] * sigmoid(u[d]) * ((token[d] - mean) * scale)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc"})
def _norm_backward(grad, normed, scale):  # type: ignore[no-untyped-def]
    """In place: the gradient of layer norm's input from that of its output."""
    count = grad.shape[0]
    mean = grad.dtype.type(0)
    along = grad.dtype.type(0)
    for d in range(count):
        mean += grad[d]
        along += grad[d] * normed[d]
    mean /= grad.dtype.type(count)
    along /= grad.dtype.type(count)
    for d in range(count):
        grad[d] = (grad[d] - mean - normed[d] * along) * scale


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def gate_backward(grad, attended, mixed, offsets, size, out, by_attended):  # type: ignore[no-untyped-def]
    """Fills u's part of `out`, and `by_attended` [B * H, n, w] with zeros past the end of a sample."""
    rows, n, width = by_attended.shape
    inner = grad.shape[1]
    heads = inner // width
    token, by_token = np.empty(inner, grad.dtype), np.empty(inner, grad.dtype)
    for b in range(offsets.shape[0] - 1):
        length = offsets[b + 1] - offsets[b]
        for i in range(length):
            low, places, at = _blocked(i, n, rows, size)
            for h in range(heads):
                token[h * width : (h + 1) * width] = attended[low + (b * heads + h) * places + at]
            mean, scale = _mean_and_scale(token)
            g, u, to = grad[offsets[b] + i], mixed[offsets[b] + i], out[offsets[b] + i]
            for d in range(inner):
                s = sigmoid(u[d])
                token[d] = (token[d] - mean) * scale
                to[d] = g[d] * token[d] * _slope(u[d], s)
                by_token[d] = g[d] * (u[d] * s)
            _norm_backward(by_token, token, scale)
            for h in range(heads):
                by_attended[b * heads + h, i] = by_token[h * width : (h + 1) * width]
        for h in range(heads):
            by_attended[b * heads + h, length:] = 0
