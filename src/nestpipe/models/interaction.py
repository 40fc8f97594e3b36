"""DLRM's pairwise dot products."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


@functools.lru_cache
def _pairs(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Places of the pairs in a matrix of dots, and for each place of the matrix the number of its pair (0 on the diagonal)."""
    i, j = torch.tril_indices(count, count, offset=-1, device=device)
    place = torch.zeros((count, count), dtype=torch.long, device=device)
    place[i, j] = place[j, i] = torch.arange(i.numel(), device=device)
    return i * count + j, place.flatten()


class PairwiseDots(torch.autograd.Function):
    """[B, F, D] -> [B, F*(F-1)/2]: dot products of all pairs of vectors of a sample, strictly lower triangle by rows.

    Its own function because the backward of plain indexing is a slow, unordered index_put; here it is one more bmm.
    """

    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        ctx.save_for_backward(vectors)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.index_select(dots.flatten(1), 1, _pairs(vectors.shape[1], vectors.device)[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (vectors,) = ctx.saved_tensors
        count = vectors.shape[1]
        # Each pair's gradient stands twice, at (i, j) and (j, i): every vector meets each of its partners once.
        symmetric = torch.index_select(grads[0], 1, _pairs(count, vectors.device)[1]).view(-1, count, count)
        symmetric.diagonal(dim1=1, dim2=2).zero_()
        return torch.bmm(symmetric, vectors)


def pairwise_dots(vectors: Tensor) -> Tensor:
    result: Tensor = PairwiseDots.apply(vectors)
    return result
