"""The autograd functions of the collections: from a window's rows to pooled vectors or single rows, and back.

Gradients of rows bypass autograd's own accumulation.  A backward pass adds them to the window's gradient buffer at
once, which sums over features, collections and micro-batches in the order the backward passes run.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nestpipe.device.sim.disjoint import disjoint
from nestpipe.errors import NestPipeError
from nestpipe.ops import pooling_kernels
from nestpipe.ops.rows import Array, add_rows, gather, segment_sums
from nestpipe.ops.triton_support import kernels_for

WINDOW_GRADS = (
    "a backward pass adds to rows that its micro-batch uses; what `grad` sends meanwhile was last used before"
)


@dataclass(frozen=True)
class Bags:
    """The bags of some lookups in one group.  Ids lie lookup by lookup, then sample by sample."""

    rows: Tensor
    grads: Tensor | None
    """None outside a pipeline, where nothing is trained."""
    index: Array
    """The row of every id."""
    lengths: Tensor
    """[L * B]: the number of ids of every bag."""
    means: np.ndarray
    """[L]: whether a lookup pools by mean."""
    columns: np.ndarray
    """[L]: the first output column of every lookup."""


class Untrained(NestPipeError, RuntimeError):
    """A backward pass reached rows that were looked up outside a pipeline."""

    def __init__(self) -> None:
        super().__init__(
            "these embeddings were looked up outside a TrainPipeline, where nothing trains them: "
            "use torch.no_grad() to evaluate, TrainPipeline.progress to train"
        )


def _floats(weights: Tensor | None, like: Tensor) -> np.ndarray:
    if weights is None:
        return np.empty(0, _dtype(like))
    return weights.detach().to(like.dtype).contiguous().numpy()


def _dtype(tensor: Tensor) -> np.dtype:
    return np.dtype(np.float64 if tensor.dtype == torch.float64 else np.float32)


def _flat(samples: Tensor) -> tuple[np.ndarray, int]:
    """[B, C] as a flat array and the distance between samples.  Copies only if columns are not contiguous."""
    if samples.stride(1) != 1 or samples.stride(0) < samples.shape[1] or not len(samples):
        samples = samples.contiguous()
    distance = samples.stride(0)
    count = (len(samples) - 1) * distance + samples.shape[1] if samples.numel() else 0
    return samples.as_strided((count,), (1,)).numpy(), distance


class PoolRows(torch.autograd.Function):
    """[B, C]: the pooled bags of all groups.  `anchor` is empty; it only makes autograd call `backward`."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        weights: list[Tensor | None],
        groups: list[Bags],
        shape: tuple[int, int],
        *given: Tensor,
    ) -> Tensor:
        ctx.groups, ctx.weights, ctx.given = groups, weights, given
        dtype = groups[0].rows.dtype if groups else torch.float32
        device = groups[0].rows.device if groups else torch.device("cpu")
        out = torch.empty(shape, dtype=dtype, device=device)
        for bags, weight in zip(groups, weights):
            if isinstance(bags.index, np.ndarray):
                pooling_kernels.pool(
                    bags.rows.numpy(),
                    bags.index,
                    bags.lengths.numpy(),
                    _floats(weight, bags.rows),
                    bags.means,
                    bags.columns,
                    *_flat(out),
                )
            elif triton := kernels_for(bags.rows, "pooling_triton"):
                triton.pool(bags.rows, bags.index, _starts(bags), weight, *_constants(bags), out)
            else:
                pool_reference(bags, weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_out = grads[0]
        weight_grads: list[Tensor | None] = []
        for bags, weight in zip(ctx.groups, ctx.weights):
            if bags.grads is None:
                raise Untrained
            if not isinstance(bags.index, np.ndarray):
                triton = kernels_for(bags.rows, "pooling_triton")
                backward = (
                    pool_backward_reference if triton is None else functools.partial(_pool_backward_triton, triton)
                )
                with disjoint(WINDOW_GRADS):
                    weight_grads.append(backward(bags, weight, grad_out))
                continue
            one = np.ones(1, _dtype(bags.rows))
            floats = _floats(weight, bags.rows)
            pooling_kernels.pool_backward(
                *_flat(grad_out),
                bags.index,
                bags.lengths.numpy(),
                floats,
                bags.means,
                bags.columns,
                bags.grads.numpy(),
                one,
            )
            if weight is not None and weight.requires_grad:
                found = np.zeros_like(floats)
                pooling_kernels.pool_backward_weights(
                    *_flat(grad_out),
                    bags.rows.numpy(),
                    bags.index,
                    bags.lengths.numpy(),
                    bags.means,
                    bags.columns,
                    found,
                )
                weight_grads.append(torch.from_numpy(found).to(weight.dtype))
            else:
                weight_grads.append(None)
        by_place = [g for g, w in zip(weight_grads, ctx.weights) if w is not None]
        return (None, None, None, None, *by_place)


def pool_reference(bags: Bags, weight: Tensor | None, out: Tensor) -> None:
    """Fills the bags' columns of `out` [B, C] in torch operations."""
    samples, dim = out.shape[0], bags.rows.shape[1]
    each = bags.rows.index_select(0, bags.index)
    factor = _factor_of(bags, weight, samples)
    pooled = segment_sums(each if factor is None else each * factor[:, None], bags.lengths)
    for first, count, column in _neighbours(bags.columns, dim):
        block = pooled[first * samples : (first + count) * samples].view(count, samples, dim).transpose(0, 1)
        out[:, column : column + count * dim].unflatten(1, (count, dim)).copy_(block)


def pool_backward_reference(bags: Bags, weight: Tensor | None, grad_out: Tensor) -> Tensor | None:
    """Adds to the bags' row gradients and returns the gradient of the weights, if needed, in torch operations."""
    assert bags.grads is not None
    samples, dim = grad_out.shape[0], bags.rows.shape[1]
    blocks = [
        grad_out[:, column : column + count * dim].unflatten(1, (count, dim)).transpose(0, 1).reshape(-1, dim)
        for _, count, column in _neighbours(bags.columns, dim)
    ]
    per_id = torch.cat(blocks).index_select(0, _bag_of(bags))
    factor = _factor_of(bags, weight, samples)
    add_rows(per_id if factor is None else per_id * factor[:, None], bags.index, bags.grads)
    if weight is None or not weight.requires_grad:
        return None
    dots = (per_id * bags.rows.index_select(0, bags.index)).sum(1)
    divisor = _divisor_of(bags, samples)
    return (dots if divisor is None else dots / divisor).to(weight.dtype)


def _pool_backward_triton(triton: ModuleType, bags: Bags, weight: Tensor | None, grad_out: Tensor) -> Tensor | None:
    """`pool_backward_reference` by Triton kernels."""
    starts, (means, columns) = _starts(bags), _constants(bags)
    of_ids = triton.bags_of(starts, len(bags.index))
    order, sorted_index = triton.backward_order(bags.index, of_ids, grad_out.shape[0])
    triton.pool_backward(grad_out, order, sorted_index, of_ids, starts, weight, means, columns, bags.grads)
    if weight is None or not weight.requires_grad:
        return None
    found = torch.empty_like(weight, dtype=bags.rows.dtype)
    triton.pool_backward_weights(grad_out, bags.rows, bags.index, of_ids, starts, means, columns, found)
    return found.to(weight.dtype)


def _starts(bags: Bags) -> Tensor:
    """[L * B + 1]: where each bag starts among the ids, and where the last one ends."""
    return functional.pad(torch.cumsum(bags.lengths, 0), (1, 0))


def _constants(bags: Bags) -> tuple[Tensor | None, Tensor]:
    """`means` (None where no lookup pools by mean) and `columns` on the device."""
    device = bags.rows.device
    means = _on_device(tuple(bags.means.tolist()), device) if bags.means.any() else None
    return means, _on_device(tuple(bags.columns.tolist()), device)


@functools.lru_cache(maxsize=256)
def _on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Made once for each model: an upload makes the host wait."""
    return torch.tensor(values, device=device)


def _neighbours(columns: np.ndarray, dim: int) -> list[tuple[int, int, int]]:
    """(first lookup, number of lookups, first column) of lookups whose output columns lie side by side."""
    runs: list[tuple[int, int, int]] = []
    for number, column in enumerate(columns.tolist()):
        if runs and column == runs[-1][2] + runs[-1][1] * dim:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, runs[-1][2])
        else:
            runs.append((number, 1, column))
    return runs


def _bag_of(bags: Bags) -> Tensor:
    """The bag of every id.  How many ids there are is known, so nobody waits for the device to count them."""
    numbers = torch.arange(len(bags.lengths), device=bags.rows.device)
    return torch.repeat_interleave(numbers, bags.lengths, output_size=len(bags.index))


def _divisor_of(bags: Bags, samples: int) -> Tensor | None:
    """Of every id, what its bag is divided by: its length for a mean, 1 for a sum.  None where there are only sums."""
    if not bags.means.any():
        return None
    by_bag = [
        bags.lengths[n * samples : (n + 1) * samples] if mean else torch.ones_like(bags.lengths[:samples])
        for n, mean in enumerate(bags.means.tolist())
    ]
    return torch.cat(by_bag).to(bags.rows.dtype).index_select(0, _bag_of(bags))


def _factor_of(bags: Bags, weight: Tensor | None, samples: int) -> Tensor | None:
    """Of every id, what its row is multiplied with; None where that is 1."""
    divisor = _divisor_of(bags, samples)
    if weight is None:
        return None if divisor is None else 1 / divisor
    given = weight.detach().to(bags.rows.dtype)
    return given if divisor is None else given / divisor


class GatherRows(torch.autograd.Function):
    """[n, D]: the row of every id, not pooled."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, grads: Tensor | None, index: Array) -> Tensor:
        ctx.index, ctx.grads = index, grads
        out = torch.empty((len(index), rows.shape[1]), dtype=rows.dtype, device=rows.device)
        if isinstance(index, np.ndarray):
            gather(rows.numpy(), index, out.numpy())
        else:
            gather(rows, index, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        if ctx.grads is None:
            raise Untrained
        if isinstance(ctx.index, np.ndarray):
            add_rows(grads[0].contiguous().numpy(), ctx.index, ctx.grads.numpy())
        else:
            with disjoint(WINDOW_GRADS):
                add_rows(grads[0], ctx.index, ctx.grads)
        return None, None, None, None


class GatherUniqueRows(torch.autograd.Function):
    """[P, D]: the window's rows that have arrived so far, each once.  Do not write to the result."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, grads: Tensor | None, arrived: int) -> Tensor:
        ctx.grads, ctx.arrived = grads, arrived
        return rows[:arrived].clone() if grads is None else rows[:arrived].view(arrived, rows.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        if ctx.grads is None:
            raise Untrained
        ctx.grads[: ctx.arrived] += grads[0]
        return None, None, None, None
