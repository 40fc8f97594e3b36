"""DLRM's interaction: the dot products of all pairs of a sample's vectors, after the vector of its dense features."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.ops import interaction_kernels as kernels
from nestpipe.ops.host import has_kernels


def interact(first: Tensor | None, others: Tensor) -> Tensor:
    """The input of DLRM's top MLP: the vector `first` [B, D] of the dense features, if any, then the dots of all pairs.

    `others` is [B, F, D].  Pairs are those of the lower triangle, row by row.
    """
    if first is None:
        one, dtype = others[:, :0], others.dtype
    elif first.shape != (others.shape[0], others.shape[2]):
        raise ValueError(
            f"vectors of shapes {tuple(first.shape)} and {tuple(others.shape)} do not interact: need [B, D], [B, F, D]"
        )
    else:
        one, dtype = first.unsqueeze(1), torch.promote_types(first.dtype, others.dtype)
    result: Tensor = Interaction.apply(one.to(dtype), others.to(dtype))
    return result


class Interaction(torch.autograd.Function):
    """first [B, 1 or 0, D], others [B, F, D] -> [B, the first vector, then the dots of all pairs].

    A function of its own, because autograd through plain torch copies the vectors into one tensor, takes every dot
    twice, copies again to put the first vector before them, and goes back through slow indexing.
    """

    @staticmethod
    def forward(ctx: Any, first: Tensor, others: Tensor) -> Tensor:
        first, others = first.contiguous(), others.contiguous()
        ctx.save_for_backward(first, others)
        if not has_kernels(others):
            return interact_reference(first, others)
        samples, firsts, dim = first.shape
        count = firsts + others.shape[1]
        out = others.new_empty((samples, firsts * dim + count * (count - 1) // 2))
        kernels.interact(first.detach().numpy(), others.detach().numpy(), out.numpy())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        first, others = ctx.saved_tensors
        if not has_kernels(others):
            return interact_backward_reference(grads[0], first, others)
        passed = torch.empty_like(first), torch.empty_like(others)
        kernels.interact_backward(
            grads[0].contiguous().numpy(), first.numpy(), others.numpy(), *(p.numpy() for p in passed)
        )
        return passed


def interact_reference(first: Tensor, others: Tensor) -> Tensor:
    """The forward pass of `Interaction` in torch operations."""
    vectors = torch.cat([first, others], dim=1)
    dots = torch.bmm(vectors, vectors.transpose(1, 2))
    pairs = torch.index_select(dots.flatten(1), 1, _pairs(vectors.shape[1], vectors.device)[0])
    return torch.cat([first.flatten(1), pairs], dim=1)


def interact_backward_reference(grad: Tensor, first: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """The backward pass of `Interaction` in torch operations."""
    vectors = torch.cat([first, others], dim=1)
    samples, count, dim = vectors.shape
    firsts = first.shape[1]
    of_first, of_dots = grad[:, : firsts * dim].view(first.shape), grad[:, firsts * dim :]
    if count < 2:
        return of_first.clone(), torch.zeros_like(others)
    # The gradient of a pair goes to (i, j) and to (j, i), so each vector meets each of its partners once.
    pairs = torch.index_select(of_dots, 1, _pairs(count, vectors.device)[1]).view(samples, count, count)
    pairs.diagonal(dim1=1, dim2=2).zero_()
    passed = torch.bmm(pairs, vectors)
    return passed[:, :firsts] + of_first, passed[:, firsts:]


@functools.lru_cache
def _pairs(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The place of every pair in a flat matrix of dots, and the pair at every place (0 on the diagonal)."""
    i, j = torch.tril_indices(count, count, offset=-1, device=device)
    place = torch.zeros((count, count), dtype=torch.long, device=device)
    place[i, j] = place[j, i] = torch.arange(i.numel(), device=device)
    return i * count + j, place.flatten()
