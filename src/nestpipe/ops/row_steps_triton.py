"""Triton kernels of the sparse optimizers: one fused step per row, in place, bit for bit as the numba kernels do.

Divisions and roots are rounded as IEEE 754 says, no multiplication is fused with an addition, and the squares of a row
are added in the order of `row_squares.py`.

Values, gradients and state are float32 or float64.  State may have more columns than the optimizer's, which come first.
Settings are numbers of the host: they are arguments of the kernel, and nothing is uploaded.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestpipe.ops.triton_math import divide, root, row_squares, tile, tile_of, wide_type


def sgd(values: Tensor, grads: Tensor, lr: float) -> None:
    """values -= lr * grads."""
    _launch(_sgd, _sgd_double, (values, grads), (lr,))


def rowwise_adagrad(values: Tensor, state: Tensor, grads: Tensor, lr: float, eps: float, scale: float = 1.0) -> None:
    """One accumulator per row, state[:, 0].  The mean square is added to it in float64 (float32 on an NPU)."""
    count, dim = values.shape
    columns = triton.next_power_of_2(max(1, dim))
    rows, _ = tile_of(dim, most=columns)
    if values.numel():
        kernel = _rowwise_adagrad_double if values.dtype == torch.float64 else _rowwise_adagrad
        strides = values.stride(0), state.stride(0), grads.stride(0)
        meta = wide_type(values), rows, columns, 32 // values.element_size()
        grid = (triton.cdiv(count, rows),)
        kernel[grid](values, state, grads, lr, eps, scale, count, dim, *strides, *meta, enable_fp_fusion=False)


def adagrad(values: Tensor, state: Tensor, grads: Tensor, lr: float, eps: float) -> None:
    """One accumulator per value, state[:, :D]."""
    _launch(_adagrad, _adagrad_double, (values, state, grads), (lr, eps))


def adam(
    values: Tensor, state: Tensor, grads: Tensor, step_size: float, keep1: float, keep2: float, eps: float
) -> None:
    """Two moments per value, state[:, :D] and state[:, D:2 * D].

    `step_size` includes the bias correction; `keep1` and `keep2` are 1 - beta.
    """
    _launch(_adam, _adam_double, (values, state, grads), (step_size, keep1, keep2, eps))


def _launch(single: Any, double: Any, rows: tuple[Tensor, ...], settings: tuple[float, ...]) -> None:
    """Runs an elementwise kernel over tiles of rows."""
    count, dim = rows[0].shape
    height, width = tile_of(dim)
    if rows[0].numel():
        kernel = double if rows[0].dtype == torch.float64 else single
        strides = (tensor.stride(0) for tensor in rows)
        grid = triton.cdiv(count, height), triton.cdiv(dim, width)
        kernel[grid](*rows, *settings, count, dim, *strides, height, width, enable_fp_fusion=False)


# A number of the host becomes a float32 argument unless its type is written down.  So every kernel has a second one with
# float64 arguments.  `tl.full` gives the argument the type of the rows, rounded as numpy does it.


@triton.jit
def _sgd(  # type: ignore[no-untyped-def]
    values, grads, lr, count, dim, values_stride, grads_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    i, d, inside = tile(count, dim, ROWS, COLUMNS)
    at = values + i[:, None] * values_stride + d[None, :]
    value = tl.load(at, mask=inside)
    g = tl.load(grads + i[:, None] * grads_stride + d[None, :], mask=inside)
    tl.store(at, value - tl.full((), lr, value.dtype) * g, mask=inside)


@triton.jit
def _sgd_double(  # type: ignore[no-untyped-def]
    values, grads, lr: tl.float64, count, dim, values_stride, grads_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    _sgd(values, grads, lr, count, dim, values_stride, grads_stride, ROWS, COLUMNS)


@triton.jit
def _rowwise_adagrad(  # type: ignore[no-untyped-def]
    values,
    state,
    grads,
    lr,
    eps,
    scale,
    count,
    dim,
    values_stride,
    state_stride,
    grads_stride,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A program has whole rows."""
    i, d, inside = tile(count, dim, ROWS, COLUMNS)
    at = values + i[:, None] * values_stride + d[None, :]
    value = tl.load(at, mask=inside)
    g = tl.load(grads + i[:, None] * grads_stride + d[None, :], mask=inside, other=0.0)
    squares = row_squares(grads, i, count, dim, grads_stride, ROWS, WIDTH)
    mean = tl.full((), scale, value.dtype).to(WIDE) * divide(squares.to(WIDE), tl.full((), dim, WIDE))
    s = (tl.load(state + i * state_stride, mask=i < count, other=0.0).to(WIDE) + mean).to(value.dtype)
    tl.store(state + i * state_stride, s, mask=i < count)
    step = divide(tl.full((ROWS,), lr, value.dtype), root(s) + tl.full((), eps, value.dtype))
    tl.store(at, value - step[:, None] * g, mask=inside)


@triton.jit
def _rowwise_adagrad_double(  # type: ignore[no-untyped-def]
    values,
    state,
    grads,
    lr: tl.float64,
    eps: tl.float64,
    scale: tl.float64,
    count,
    dim,
    values_stride,
    state_stride,
    grads_stride,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    _rowwise_adagrad(
        values,
        state,
        grads,
        lr,
        eps,
        scale,
        count,
        dim,
        values_stride,
        state_stride,
        grads_stride,
        WIDE,
        ROWS,
        COLUMNS,
        WIDTH,
    )


@triton.jit
def _adagrad(  # type: ignore[no-untyped-def]
    values,
    state,
    grads,
    lr,
    eps,
    count,
    dim,
    values_stride,
    state_stride,
    grads_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    i, d, inside = tile(count, dim, ROWS, COLUMNS)
    at = values + i[:, None] * values_stride + d[None, :]
    kept = state + i[:, None] * state_stride + d[None, :]
    value = tl.load(at, mask=inside)
    g = tl.load(grads + i[:, None] * grads_stride + d[None, :], mask=inside)
    s = tl.load(kept, mask=inside) + g * g
    tl.store(kept, s, mask=inside)
    change = divide(g, root(s) + tl.full((), eps, value.dtype))
    tl.store(at, value - tl.full((), lr, value.dtype) * change, mask=inside)


@triton.jit
def _adagrad_double(  # type: ignore[no-untyped-def]
    values,
    state,
    grads,
    lr: tl.float64,
    eps: tl.float64,
    count,
    dim,
    values_stride,
    state_stride,
    grads_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    _adagrad(values, state, grads, lr, eps, count, dim, values_stride, state_stride, grads_stride, ROWS, COLUMNS)


@triton.jit
def _adam(  # type: ignore[no-untyped-def]
    values,
    state,
    grads,
    step_size,
    keep1,
    keep2,
    eps,
    count,
    dim,
    values_stride,
    state_stride,
    grads_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    i, d, inside = tile(count, dim, ROWS, COLUMNS)
    at = values + i[:, None] * values_stride + d[None, :]
    first = state + i[:, None] * state_stride + d[None, :]
    second = first + dim
    value = tl.load(at, mask=inside)
    g = tl.load(grads + i[:, None] * grads_stride + d[None, :], mask=inside)
    m = tl.load(first, mask=inside)
    m = m + (g - m) * tl.full((), keep1, value.dtype)
    v = tl.load(second, mask=inside)
    v = v + (g * g - v) * tl.full((), keep2, value.dtype)
    tl.store(first, m, mask=inside)
    tl.store(second, v, mask=inside)
    change = divide(m, root(v) + tl.full((), eps, value.dtype))
    tl.store(at, value - tl.full((), step_size, value.dtype) * change, mask=inside)


@triton.jit
def _adam_double(  # type: ignore[no-untyped-def]
    values,
    state,
    grads,
    step_size: tl.float64,
    keep1: tl.float64,
    keep2: tl.float64,
    eps: tl.float64,
    count,
    dim,
    values_stride,
    state_stride,
    grads_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    _adam(
        values,
        state,
        grads,
        step_size,
        keep1,
        keep2,
        eps,
        count,
        dim,
        values_stride,
        state_stride,
        grads_stride,
        ROWS,
        COLUMNS,
    )
