"""Triton kernels between a window's rows and the model: pooling forward and backward, in a fixed order.

Ids lie lookup by lookup, then sample by sample; bag l * B + b is lookup l of sample b.  `starts` [L * B + 1] says where
each bag starts among the ids and where the last one ends.  `means` [L] says which lookups pool by mean (None: none does),
`columns` [L] is the first output column of each.  Everything is on the device, and nothing is read back.

The bits are those of the numba kernels, which compute factors of gradients in float64.  So do these, but on an Ascend
NPU, which has none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nestpipe.ops.triton_math import divide, tile_of, tree_sum, wide_type

_AHEAD = 8
"""Rows of a bag or of a run whose loads are under way at the same time."""


def bags_of(starts: Tensor, ids: int) -> Tensor:
    """int32 [ids]: the bag of every id."""
    bags = torch.arange(starts.numel() - 1, dtype=torch.int32, device=starts.device)
    return torch.repeat_interleave(bags, starts.diff(), output_size=ids)


def backward_order(index: Tensor, bags: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """`order` and `sorted_index` for `pool_backward`: ids by row; those of a row by sample, by lookup, and as they lie.

    That is the order in which the numba kernel adds.
    """
    lookup = torch.div(bags, max(1, samples), rounding_mode="floor")
    sample = bags - lookup * samples
    # Two stable sorts, not one by a combined key: a key may not fit.
    by_sample = torch.argsort(sample, stable=True)
    sorted_index, by_row = torch.sort(index[by_sample], stable=True)
    return by_sample[by_row], sorted_index


def pool(
    rows: Tensor,
    index: Tensor,
    starts: Tensor,
    weights: Tensor | None,
    means: Tensor | None,
    columns: Tensor,
    out: Tensor,
) -> None:
    """out[b, columns[l]:+D] = sum (or mean) of weight * row over bag (l, b), in the order of ids.  No weights: all ones."""
    bags, dim, samples = starts.numel() - 1, rows.shape[1], out.shape[0]
    _, width = tile_of(dim)
    if bags and dim:
        _pool[bags, triton.cdiv(dim, width)](
            *(rows, index, starts, _floats(weights, rows), means, columns, out),
            *(samples, dim, rows.stride(0), out.stride(0)),
            *(weights is not None, means is not None, width, _AHEAD),
            num_warps=max(1, width // 64),
            enable_fp_fusion=False,
        )


def pool_backward(
    grad_out: Tensor,
    order: Tensor,
    sorted_index: Tensor,
    bags: Tensor,
    starts: Tensor,
    weights: Tensor | None,
    means: Tensor | None,
    columns: Tensor,
    grad_rows: Tensor,
) -> None:
    """Adds the gradient of `pool` to grad_rows: id order[i] to row sorted_index[i], in the order of i.

    `order` and `sorted_index` are `backward_order`'s; `sorted_index` ascends.  `bags` [n] is the bag of every id.
    """
    ids, dim, samples = order.numel(), grad_rows.shape[1], grad_out.shape[0]
    _, width = tile_of(dim)
    if ids and dim:
        grad_out = _side_by_side(grad_out)
        _pool_backward[ids, triton.cdiv(dim, width)](
            *(grad_out, order, sorted_index, bags, starts, _floats(weights, grad_rows), means, columns, grad_rows),
            *(ids, samples, dim, grad_out.stride(0), grad_rows.stride(0)),
            *(wide_type(grad_rows), weights is not None, means is not None, width, _AHEAD),
            num_warps=max(1, width // 64),
            enable_fp_fusion=False,
        )


def pool_backward_weights(
    grad_out: Tensor,
    rows: Tensor,
    index: Tensor,
    bags: Tensor,
    starts: Tensor,
    means: Tensor | None,
    columns: Tensor,
    grad_weights: Tensor,
) -> None:
    """grad_weights[j] = dot of its bag's output gradient with its row, over the length of a mean's bag.

    Products are added in float64 (float32 on an NPU), by `tree_sum`: not in the order of the numba kernel.
    """
    ids, dim, samples = index.numel(), rows.shape[1], grad_out.shape[0]
    if not ids or not dim:
        grad_weights.zero_()
        return
    width = triton.next_power_of_2(dim)
    height, _ = tile_of(dim, most=width)
    grad_out = _side_by_side(grad_out)
    _pool_backward_weights[(triton.cdiv(ids, height),)](
        *(grad_out, rows, index, bags, starts, means, columns, grad_weights),
        *(ids, samples, dim, grad_out.stride(0), rows.stride(0)),
        *(wide_type(rows), means is not None, height, width, width.bit_length() - 1),
        enable_fp_fusion=False,
    )


def _floats(weights: Tensor | None, like: Tensor) -> Tensor | None:
    return None if weights is None else weights.detach().to(like.dtype).contiguous()


def _side_by_side(samples: Tensor) -> Tensor:
    """With contiguous columns.  Autograd often passes back a slice of something wider, which then need not be copied."""
    return samples if samples.stride(1) == 1 else samples.contiguous()


@triton.jit
def _pool(  # type: ignore[no-untyped-def]
    rows,
    index,
    starts,
    weights,
    means,
    columns,
    out,
    samples,
    dim,
    rows_stride,
    out_stride,
    WEIGHTED: tl.constexpr,
    AVERAGED: tl.constexpr,
    WIDTH: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A program per bag and block of columns."""
    bag = tl.program_id(0)
    lookup = bag // samples
    sample = (bag - lookup * samples).to(tl.int64)
    start, end = tl.load(starts + bag), tl.load(starts + bag + 1)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), rows.dtype.element_ty)
    for first in range(start, end, AHEAD):
        for ahead in tl.static_range(AHEAD):
            j = first + ahead
            there = d < tl.where(j < end, dim, 0)
            row = tl.load(index + j, mask=j < end, other=0).to(tl.int64)
            value = tl.load(rows + row * rows_stride + d, mask=there)
            if WEIGHTED:
                value = tl.load(weights + j, mask=j < end, other=0.0) * value
            # The first row is not added to 0, which would turn -0.0 into 0.
            total = tl.where(there, tl.where(j > start, total + value, value), total)
    if AVERAGED:
        length = tl.where(tl.load(means + lookup) != 0, tl.maximum(end - start, 1), 1)
        total = divide(total, tl.full((WIDTH,), length, total.dtype))
    to = out + sample * out_stride + tl.load(columns + lookup) + d
    tl.store(to, total, mask=d < dim)


@triton.jit
def _factor(  # type: ignore[no-untyped-def]
    id, bag, lookup, there, weights, starts, means, WIDE: tl.constexpr, WEIGHTED: tl.constexpr, AVERAGED: tl.constexpr
):
    """What an id's row is multiplied with in its bag."""
    factor = tl.full((), 1.0, WIDE)
    if WEIGHTED:
        factor = tl.load(weights + id, mask=there, other=0.0).to(WIDE)
    if AVERAGED:
        start = tl.load(starts + bag, mask=there, other=0)
        end = tl.load(starts + bag + 1, mask=there, other=1)
        mean = tl.load(means + lookup, mask=there, other=0) != 0
        # Not `divide`, which triton-ascend cannot lower for a scalar.  In float64 it is the same.
        factor = factor / tl.where(mean, end - start, 1).to(WIDE)
    return factor


@triton.jit
def _pool_backward(  # type: ignore[no-untyped-def]
    grad_out,
    order,
    sorted_index,
    bags,
    starts,
    weights,
    means,
    columns,
    grad_rows,
    ids,
    samples,
    dim,
    grad_stride,
    rows_stride,
    WIDE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    AVERAGED: tl.constexpr,
    WIDTH: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A program per place in the order and block of columns; the one that begins a run of a row's ids does the run."""
    at = tl.program_id(0)
    row = tl.load(sorted_index + at)
    begins = row != tl.load(sorted_index + at - 1, mask=at > 0, other=-1)
    if begins:
        d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        to = grad_rows + row.to(tl.int64) * rows_stride + d
        total = tl.load(to, mask=d < dim)
        goes_on = begins
        while goes_on:
            for ahead in tl.static_range(AHEAD):
                same = row == tl.load(sorted_index + at + ahead, mask=at + ahead < ids, other=-1)
                id = tl.load(order + at + ahead, mask=same, other=0)
                bag = tl.load(bags + id, mask=same, other=0)
                lookup = bag // samples
                sample = (bag - lookup * samples).to(tl.int64)
                there = d < tl.where(same, dim, 0)
                column = tl.load(columns + lookup, mask=same, other=0)
                passed = tl.load(grad_out + sample * grad_stride + column + d, mask=there)
                if WEIGHTED or AVERAGED:
                    factor = _factor(id, bag, lookup, same, weights, starts, means, WIDE, WEIGHTED, AVERAGED)
                    added = (total.to(WIDE) + factor * passed.to(WIDE)).to(total.dtype)
                else:
                    added = total + passed
                total = tl.where(there, added, total)
            at += AHEAD
            goes_on = row == tl.load(sorted_index + at, mask=at < ids, other=-1)
        tl.store(to, total, mask=d < dim)


@triton.jit
def _pool_backward_weights(  # type: ignore[no-untyped-def]
    grad_out,
    rows,
    index,
    bags,
    starts,
    means,
    columns,
    grad_weights,
    ids,
    samples,
    dim,
    grad_stride,
    rows_stride,
    WIDE: tl.constexpr,
    AVERAGED: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """A program per block of ids."""
    j = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    d = tl.arange(0, WIDTH)
    row = tl.load(index + j, mask=j < ids, other=0).to(tl.int64)
    bag = tl.load(bags + j, mask=j < ids, other=0)
    lookup = bag // samples
    sample = (bag - lookup * samples).to(tl.int64)
    column = tl.load(columns + lookup, mask=j < ids, other=0)
    inside = (j < ids)[:, None] & (d < dim)[None, :]
    passed = tl.load(grad_out + (sample * grad_stride + column)[:, None] + d[None, :], mask=inside, other=0.0)
    value = tl.load(rows + row[:, None] * rows_stride + d[None, :], mask=inside, other=0.0)
    total = tree_sum((passed * value).to(WIDE), HEIGHT, LEVELS)
    if AVERAGED:
        start = tl.load(starts + bag, mask=j < ids, other=0)
        end = tl.load(starts + bag + 1, mask=j < ids, other=1)
        mean = tl.load(means + lookup, mask=j < ids, other=0) != 0
        total = divide(total, tl.where(mean, end - start, 1).to(WIDE))
    tl.store(grad_weights + j, total.to(value.dtype), mask=j < ids)
