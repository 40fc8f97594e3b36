"""DLRM's interaction: the pairwise dot products of a sample's vectors, beside the vector of its dense features."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.ops import interaction_kernels


class Interaction(torch.autograd.Function):
    """first [B, 1 or 0, D], others [B, F, D] -> [B, the first vector, then the dots of all pairs, lower triangle by rows].

    Its own function because plain torch copies the vectors into one tensor, takes every dot twice, copies again to set the first
    vector beside them, and passes back through indexing, which is slow and unordered.
    """

    @staticmethod
    def forward(ctx: Any, first: Tensor, others: Tensor) -> Tensor:
        first, others = first.contiguous(), others.contiguous()
        ctx.save_for_backward(first, others)
        if not _on_host(others):
            return _interact_with_torch(first, others)
        samples, firsts, dim = first.shape
        count = firsts + others.shape[1]
        out = others.new_empty((samples, firsts * dim + count * (count - 1) // 2))
        interaction_kernels.interact(first.detach().numpy(), others.detach().numpy(), out.numpy())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        first, others = ctx.saved_tensors
        if not _on_host(others):
            return _interact_backward_with_torch(grads[0], first, others)
        passed = torch.empty_like(first), torch.empty_like(others)
        interaction_kernels.interact_backward(
            grads[0].contiguous().numpy(), first.numpy(), others.numpy(), *(p.numpy() for p in passed)
        )
        return passed


def interact(first: Tensor | None, others: Tensor) -> Tensor:
    """What DLRM's top MLP sees: the vector [B, D] of the dense features, if any, and the dots of all pairs of vectors."""
    if first is None:
        one, wanted = others[:, :0], others.dtype
    elif first.shape != (others.shape[0], others.shape[2]):
        raise ValueError(
            f"vectors of shapes {tuple(first.shape)} and {tuple(others.shape)} do not interact: [B, D], [B, F, D]"
        )
    else:
        one, wanted = first.unsqueeze(1), torch.promote_types(first.dtype, others.dtype)
    result: Tensor = Interaction.apply(one.to(wanted), others.to(wanted))
    return result


def _on_host(vectors: Tensor) -> bool:
    return vectors.device.type == "cpu" and vectors.dtype in (torch.float32, torch.float64)


# What a device runs: the same in torch operations (written, not yet run on one).


@functools.lru_cache
def _pairs(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Places of the pairs in a matrix of dots, and for each place of the matrix the number of its pair (0 on the diagonal)."""
    i, j = torch.tril_indices(count, count, offset=-1, device=device)
    place = torch.zeros((count, count), dtype=torch.long, device=device)
    place[i, j] = place[j, i] = torch.arange(i.numel(), device=device)
    return i * count + j, place.flatten()


def _interact_with_torch(first: Tensor, others: Tensor) -> Tensor:
    vectors = torch.cat([first, others], dim=1)
    dots = torch.bmm(vectors, vectors.transpose(1, 2))
    pairs = torch.index_select(dots.flatten(1), 1, _pairs(vectors.shape[1], vectors.device)[0])
    return torch.cat([first.flatten(1), pairs], dim=1)


def _interact_backward_with_torch(grad: Tensor, first: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    vectors = torch.cat([first, others], dim=1)
    samples, count, dim = vectors.shape
    firsts = first.shape[1]
    of_first, of_dots = grad[:, : firsts * dim].view(first.shape), grad[:, firsts * dim :]
    if count < 2:
        return of_first.clone(), torch.zeros_like(others)
    # Each pair's gradient stands twice, at (i, j) and (j, i): every vector meets each of its partners once.
    pairs = torch.index_select(of_dots, 1, _pairs(count, vectors.device)[1]).view(samples, count, count)
    pairs.diagonal(dim1=1, dim2=2).zero_()
    passed = torch.bmm(pairs, vectors)
    return passed[:, :firsts] + of_first, passed[:, firsts:]
