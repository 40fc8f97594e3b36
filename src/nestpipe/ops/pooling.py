"""The autograd functions of the collections: from a window's rows to pooled vectors or single rows, and back.

Gradients of rows bypass autograd's own accumulation.  A backward pass adds them to the window's gradient buffer at
once, which sums over features, collections and micro-batches in the order the backward passes run.
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
    """The bags of some lookups in one group.  Ids lie lookup by lookup, then sample by sample."""

    rows: Tensor
    grads: Tensor | None
    """None outside a pipeline, where nothing is trained."""
    index: np.ndarray
    """The row of every id."""
    lengths: np.ndarray
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
                pool_reference(bags, weight, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_out = grads[0]
        weight_grads: list[Tensor | None] = []
        for bags, weight in zip(ctx.groups, ctx.weights):
            if bags.grads is None:
                raise Untrained
            if grad_out.device.type != "cpu":
                weight_grads.append(pool_backward_reference(bags, weight, grad_out))
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


def pool_reference(bags: Bags, weight: Tensor | None, out: Tensor) -> None:
    """Fills the bags' columns of `out` [B, C] in torch operations."""
    samples, dim = out.shape[0], bags.rows.shape[1]
    index, bag, divisor = _ids_of(bags, samples)
    factor = _factor_of(bags, weight) / divisor
    pooled = torch.zeros((len(bags.lengths), dim), dtype=out.dtype, device=out.device)
    pooled.index_add_(0, bag, bags.rows[index] * factor[:, None])
    for number, column in enumerate(bags.columns.tolist()):
        out[:, column : column + dim] = pooled[number * samples : (number + 1) * samples]


def pool_backward_reference(bags: Bags, weight: Tensor | None, grad_out: Tensor) -> Tensor | None:
    """Adds to the bags' row gradients and returns the gradient of the weights, if needed, in torch operations."""
    assert bags.grads is not None
    samples, dim = grad_out.shape[0], bags.rows.shape[1]
    index, bag, divisor = _ids_of(bags, samples)
    factor = _factor_of(bags, weight) / divisor
    per_id = torch.cat([grad_out[:, column : column + dim] for column in bags.columns.tolist()])[bag]
    bags.grads.index_add_(0, index, per_id * factor[:, None])
    if weight is None or not weight.requires_grad:
        return None
    return ((per_id * bags.rows[index]).sum(1) / divisor).to(weight.dtype)


def _ids_of(bags: Bags, samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of every id: its row, its bag, and the divisor of its bag (1 for a sum, the length for a mean)."""
    device = bags.rows.device
    lengths = torch.from_numpy(bags.lengths).to(device)
    bag = torch.repeat_interleave(torch.arange(len(lengths), device=device), lengths)
    mean = torch.from_numpy(bags.means).to(device)[bag // max(1, samples)]
    divisor = torch.where(mean, lengths[bag], 1).to(bags.rows.dtype)
    return torch.from_numpy(bags.index).long().to(device), bag, divisor


def _factor_of(bags: Bags, weight: Tensor | None) -> Tensor:
    if weight is None:
        return torch.ones(len(bags.index), dtype=bags.rows.dtype, device=bags.rows.device)
    return weight.detach().to(bags.rows.dtype)


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
