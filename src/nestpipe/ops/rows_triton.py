"""Triton kernels over rows: gathers, copies and sums.

No atomics, and no order that depends on which program runs first: the same input gives the same bits.  Rows may be part
of wider ones; their columns lie side by side.  Index lists are contiguous int32 or int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestpipe.ops.triton_math import TILE, tile, tile_of, tree_sum, wide_type

_AHEAD = 8
"""Rows of a run whose loads are under way at the same time."""


def gather(source: Tensor, index: Tensor, out: Tensor) -> None:
    """out[i] = source[index[i]]; rows with a negative index are unchanged."""
    count, dim = out.shape
    rows, columns = tile_of(dim)
    if out.numel():
        grid = triton.cdiv(count, rows), triton.cdiv(dim, columns)
        _gather[grid](
            source, index, out, count, dim, source.stride(0), out.stride(0), rows, columns, enable_fp_fusion=False
        )


def copy_rows(source: Tensor, source_index: Tensor, target: Tensor, target_index: Tensor) -> None:
    """target[target_index[i]] = source[source_index[i]].  No two target rows may be the same."""
    count, dim = source_index.numel(), source.shape[1]
    rows, columns = tile_of(dim)
    if count and dim:
        grid = triton.cdiv(count, rows), triton.cdiv(dim, columns)
        strides = source.stride(0), target.stride(0)
        _copy_rows[grid](
            source, source_index, target, target_index, count, dim, *strides, rows, columns, enable_fp_fusion=False
        )


def add_sorted_rows(source: Tensor, order: Tensor, sorted_index: Tensor, target: Tensor) -> None:
    """target[sorted_index[i]] += source[order[i]], in the order of i.

    `sorted_index` ascends.  If `order` is the stable sort of an index, the bits are those of numba's `scatter_add` with
    that index.
    """
    count, dim = sorted_index.numel(), target.shape[1]
    _, columns = tile_of(dim)
    if count and dim:
        grid = count, triton.cdiv(dim, columns)
        strides = source.stride(0), target.stride(0)
        _add_sorted_rows[grid](
            *(source, order, sorted_index, target, count, dim, *strides, columns, _AHEAD),
            num_warps=max(1, columns // 64),
            enable_fp_fusion=False,
        )


def sum_of_squares(grads: Tensor) -> Tensor:
    """[]: the sum of the squares of all gradients, in float64 (float32 on an NPU), on their device."""
    count, dim = grads.shape
    rows, columns = tile_of(dim)
    wide = wide_type(grads)
    dtype = torch.float32 if wide == tl.float32 else torch.float64
    if not grads.numel():
        return grads.new_zeros((), dtype=dtype)
    programs = triton.cdiv(count, rows)
    parts, out = grads.new_empty(programs, dtype=dtype), grads.new_empty((), dtype=dtype)
    levels = (rows * columns).bit_length() - 1
    _squares[(programs,)](
        grads, parts, count, dim, grads.stride(0), wide, rows, columns, levels, enable_fp_fusion=False
    )
    _sum_of_parts[(1,)](parts, out, programs, TILE, TILE.bit_length() - 1, enable_fp_fusion=False)
    return out


@triton.jit
def _gather(  # type: ignore[no-untyped-def]
    source, index, out, count, dim, source_stride, out_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    i, d, inside = tile(count, dim, ROWS, COLUMNS)
    j = tl.load(index + i, mask=i < count, other=-1).to(tl.int64)
    inside = inside & (j >= 0)[:, None]
    row = tl.load(source + j[:, None] * source_stride + d[None, :], mask=inside)
    tl.store(out + i[:, None] * out_stride + d[None, :], row, mask=inside)


@triton.jit
def _copy_rows(  # type: ignore[no-untyped-def]
    source,
    source_index,
    target,
    target_index,
    count,
    dim,
    source_stride,
    target_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    i, d, inside = tile(count, dim, ROWS, COLUMNS)
    s = tl.load(source_index + i, mask=i < count, other=0).to(tl.int64)
    t = tl.load(target_index + i, mask=i < count, other=0).to(tl.int64)
    row = tl.load(source + s[:, None] * source_stride + d[None, :], mask=inside)
    tl.store(target + t[:, None] * target_stride + d[None, :], row, mask=inside)


@triton.jit
def _add_sorted_rows(  # type: ignore[no-untyped-def]
    source,
    order,
    sorted_index,
    target,
    count,
    dim,
    source_stride,
    target_stride,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A program per place; the one whose place begins a run of equal rows does the whole run."""
    at = tl.program_id(0)
    row = tl.load(sorted_index + at)
    begins = row != tl.load(sorted_index + at - 1, mask=at > 0, other=-1)
    if begins:
        d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        to = target + row.to(tl.int64) * target_stride + d
        total = tl.load(to, mask=d < dim)
        goes_on = begins
        while goes_on:
            for ahead in tl.static_range(AHEAD):
                same = row == tl.load(sorted_index + at + ahead, mask=at + ahead < count, other=-1)
                s = tl.load(order + at + ahead, mask=same, other=0).to(tl.int64)
                there = d < tl.where(same, dim, 0)
                total = tl.where(there, total + tl.load(source + s * source_stride + d, mask=there), total)
            at += AHEAD
            goes_on = row == tl.load(sorted_index + at, mask=at < count, other=-1)
        tl.store(to, total, mask=d < dim)


@triton.jit
def _squares(  # type: ignore[no-untyped-def]
    grads,
    parts,
    count,
    dim,
    stride,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """parts[p] = the sum of squares of program p's rows."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), WIDE)
    for low in range(0, dim, COLUMNS):
        d = low + tl.arange(0, COLUMNS)
        inside = (i < count)[:, None] & (d < dim)[None, :]
        g = tl.load(grads + i[:, None] * stride + d[None, :], mask=inside, other=0.0).to(WIDE)
        total += g * g
    part = tree_sum(tl.reshape(total, (1, ROWS * COLUMNS)), 1, LEVELS)
    tl.store(parts + tl.program_id(0) + tl.arange(0, 1), part)


@triton.jit
def _sum_of_parts(parts, out, count, SIZE: tl.constexpr, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros((SIZE,), parts.dtype.element_ty)
    for low in range(0, count, SIZE):
        i = low + tl.arange(0, SIZE)
        total += tl.load(parts + i, mask=i < count, other=0.0)
    tl.store(out + tl.arange(0, 1), tree_sum(tl.reshape(total, (1, SIZE)), 1, LEVELS))
