"""From a window's rows to what a model sees, and back: the autograd functions of the collections.

Gradients of rows do not pass through autograd's own accumulation: they are added at once to the window's gradient buffer, which
sums over features, collections and micro-batches in the order the backward passes run.  On the host numba does the work; on a
device plain torch operations do (written, not yet run on one).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe.errors import NestPipeError
from nestpipe.ops import pooling_kernels
from nestpipe.tables import kernels


@dataclass(frozen=True)
class Bags:
    """The bags of some lookups in one group: rows by place, in the order lookup, sample, id."""

    rows: Tensor
    grads: Tensor | None
    """None: looked up outside a pipeline, where nothing is trained."""
    index: np.ndarray
    lengths: np.ndarray
    """[L * B]."""
    means: np.ndarray
    """[L]: pooled by mean."""
    columns: np.ndarray
    """[L]: first output column of each lookup."""


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
    """[B, C] as one row of numbers and the distance from sample to sample; copied only where columns do not lie side by side."""
    if samples.stride(1) != 1 or samples.stride(0) < samples.shape[1] or not len(samples):
        samples = samples.contiguous()
    distance = samples.stride(0)
    count = (len(samples) - 1) * distance + samples.shape[1] if samples.numel() else 0
    return samples.as_strided((count,), (1,)).numpy(), distance


class PoolRows(torch.autograd.Function):
    """[B, C] pooled output of the bags of all groups.  `anchor` is empty and only makes autograd call `backward`."""

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
            if out.device.type == "cpu":
                pooling_kernels.pool(
                    bags.rows.numpy(),
                    bags.index,
                    bags.lengths,
                    _floats(weight, bags.rows),
                    bags.means,
                    bags.columns,
                    *_flat(out),
                )
            else:
                _pool_with_torch(bags, weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_out = grads[0]
        weight_grads: list[Tensor | None] = []
        for bags, weight in zip(ctx.groups, ctx.weights):
            if bags.grads is None:
                raise Untrained
            if grad_out.device.type != "cpu":
                weight_grads.append(_pool_backward_with_torch(bags, weight, grad_out))
                continue
            one = np.ones(1, _dtype(bags.rows))
            floats = _floats(weight, bags.rows)
            pooling_kernels.pool_backward(
                *_flat(grad_out), bags.index, bags.lengths, floats, bags.means, bags.columns, bags.grads.numpy(), one
            )
            if weight is not None and weight.requires_grad:
                found = np.zeros_like(floats)
                pooling_kernels.pool_backward_weights(
                    *_flat(grad_out), bags.rows.numpy(), bags.index, bags.lengths, bags.means, bags.columns, found
                )
                weight_grads.append(torch.from_numpy(found).to(weight.dtype))
            else:
                weight_grads.append(None)
        by_place = [g for g, w in zip(weight_grads, ctx.weights) if w is not None]
        return (None, None, None, None, *by_place)


def _device_bags(bags: Bags) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Index, bag number, sample and lookup of every id, on the rows' device."""
    device = bags.rows.device
    lengths = torch.from_numpy(bags.lengths).to(device)
    bag = torch.repeat_interleave(torch.arange(len(bags.lengths), device=device), lengths)
    return torch.from_numpy(bags.index).long().to(device), bag, lengths, torch.from_numpy(bags.columns).to(device)


def _bag_factors(bags: Bags, weight: Tensor | None, bag: Tensor, lengths: Tensor, samples: int) -> Tensor:
    factor = torch.ones(bag.numel(), dtype=bags.rows.dtype, device=bags.rows.device)
    if weight is not None:
        factor = weight.detach().to(factor.dtype)
    mean = torch.from_numpy(bags.means).to(bag.device)[bag // max(1, samples)]
    return torch.where(mean, factor / lengths[bag].to(factor.dtype), factor)


def _pool_with_torch(bags: Bags, weight: Tensor | None, out: Tensor) -> None:
    samples, dim = out.shape[0], bags.rows.shape[1]
    index, bag, lengths, columns = _device_bags(bags)
    factor = _bag_factors(bags, weight, bag, lengths, samples)
    pooled = torch.zeros((lengths.numel(), dim), dtype=out.dtype, device=out.device)
    pooled.index_add_(0, bag, bags.rows[index] * factor[:, None])
    for place, column in enumerate(columns.tolist()):
        out[:, column : column + dim] = pooled[place * samples : (place + 1) * samples]


def _pool_backward_with_torch(bags: Bags, weight: Tensor | None, grad_out: Tensor) -> Tensor | None:
    assert bags.grads is not None
    samples, dim = grad_out.shape[0], bags.rows.shape[1]
    index, bag, lengths, columns = _device_bags(bags)
    factor = _bag_factors(bags, weight, bag, lengths, samples)
    pieces = [grad_out[:, column : column + dim] for column in columns.tolist()]
    per_id = torch.cat(pieces)[bag]
    bags.grads.index_add_(0, index, per_id * factor[:, None])
    if weight is None or not weight.requires_grad:
        return None
    dots = (per_id * bags.rows[index]).sum(1)
    mean = torch.from_numpy(bags.means).to(bag.device)[bag // max(1, samples)]
    return torch.where(mean, dots / lengths[bag].to(dots.dtype), dots).to(weight.dtype)


class GatherRows(torch.autograd.Function):
    """[n, D]: the row of every id, not pooled."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, grads: Tensor | None, index: np.ndarray) -> Tensor:
        ctx.index, ctx.grads = index, grads
        out = torch.empty((len(index), rows.shape[1]), dtype=rows.dtype, device=rows.device)
        if rows.device.type == "cpu":
            kernels.gather(rows.numpy(), index, out.numpy())
        else:
            torch.index_select(rows, 0, torch.from_numpy(index).long().to(rows.device), out=out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        if ctx.grads is None:
            raise Untrained
        if ctx.grads.device.type == "cpu":
            kernels.scatter_add(grads[0].contiguous().numpy(), ctx.index, ctx.grads.numpy())
        else:
            ctx.grads.index_add_(0, torch.from_numpy(ctx.index).long().to(ctx.grads.device), grads[0])
        return None, None, None, None


class GatherUniqueRows(torch.autograd.Function):
    """[P, D]: the window's rows that have come so far, each once.  What it returns must not be written to."""

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
