"""Numba kernels of activations, norms and gates on the host, without the GIL."""

from __future__ import annotations

import numba
import numpy as np
from numba.extending import register_jitable

from nestpipe.ops.register_math import sigmoid

EPS = 1e-6


@register_jitable
def _slope(x, s):  # type: ignore[no-untyped-def]
    """The derivative of silu at x, whose sigmoid is s.  (An integer constant would turn it into a float64.)"""
    silu = x * s
    return s + (silu - silu * s)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def silu_columns(mixed, start, out):  # type: ignore[no-untyped-def]
    """out = silu of the columns of `mixed` from `start` on."""
    for t in range(out.shape[0]):
        x, to = mixed[t, start : start + out.shape[1]], out[t]
        for d in range(out.shape[1]):
            to[d] = x[d] * sigmoid(x[d])


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def silu_columns_backward(mixed, start, grad, out):  # type: ignore[no-untyped-def]
    """Fills the columns of `out` from `start` on."""
    for t in range(grad.shape[0]):
        x, g, to = mixed[t, start : start + grad.shape[1]], grad[t], out[t, start : start + grad.shape[1]]
        for d in range(grad.shape[1]):
            to[d] = g[d] * _slope(x[d], sigmoid(x[d]))


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc"})
def _mean_and_scale(values, centred):  # type: ignore[no-untyped-def]
    """What a norm subtracts from a row and multiplies it with."""
    count, real = values.shape[0], values.dtype.type
    mean = real(0)
    if centred:
        total = real(0)
        for d in range(count):
            total += values[d]
        mean = total / real(count)
    total = real(0)
    for d in range(count):
        total += (values[d] - mean) * (values[d] - mean)
    return mean, real(1 / np.sqrt(total / count + EPS))


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def gated_norm(x, gate, centred, out):  # type: ignore[no-untyped-def]
    """out = norm(x) * gate, by rows; a `gate` without columns is none."""
    gated = gate.shape[1] > 0
    for t in range(x.shape[0]):
        token, to = x[t], out[t]
        mean, scale = _mean_and_scale(token, centred)
        if gated:
            g = gate[t]
            for d in range(x.shape[1]):
                to[d] = (token[d] - mean) * scale * g[d]
        else:
            for d in range(x.shape[1]):
                to[d] = (token[d] - mean) * scale


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract", "reassoc"})
def _norm_backward(grad, token, mean, scale, centred):  # type: ignore[no-untyped-def]
    """In place: the gradient of a norm's input from that of its output."""
    count, real = grad.shape[0], grad.dtype.type
    shift, along = real(0), real(0)
    for d in range(count):
        shift += grad[d]
        along += grad[d] * ((token[d] - mean) * scale)
    shift = shift / real(count) if centred else real(0)
    along /= real(count)
    for d in range(count):
        grad[d] = (grad[d] - shift - (token[d] - mean) * scale * along) * scale


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def gated_norm_backward(grad, x, gate, centred, by_x, by_gate):  # type: ignore[no-untyped-def]
    gated = gate.shape[1] > 0
    for t in range(x.shape[0]):
        token, g, to = x[t], grad[t], by_x[t]
        mean, scale = _mean_and_scale(token, centred)
        if gated:
            u, to_gate = gate[t], by_gate[t]
            for d in range(x.shape[1]):
                to_gate[d] = g[d] * ((token[d] - mean) * scale)
                to[d] = g[d] * u[d]
        else:
            to[:] = g
        _norm_backward(to, token, mean, scale, centred)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def silu_product(mixed, out):  # type: ignore[no-untyped-def]
    """out = silu(first half) * second half of every row."""
    width = out.shape[1]
    for t in range(out.shape[0]):
        x, y, to = mixed[t, :width], mixed[t, width:], out[t]
        for d in range(width):
            to[d] = x[d] * sigmoid(x[d]) * y[d]


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def silu_product_backward(grad, mixed, out):  # type: ignore[no-untyped-def]
    width = grad.shape[1]
    for t in range(grad.shape[0]):
        g, x, y = grad[t], mixed[t, :width], mixed[t, width:]
        by_x, by_y = out[t, :width], out[t, width:]
        for d in range(width):
            s = sigmoid(x[d])
            by_x[d] = g[d] * y[d] * _slope(x[d], s)
            by_y[d] = g[d] * (x[d] * s)
