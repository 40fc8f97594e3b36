"""Softmax over a target and its sampled negatives, without ever laying out the negatives' vectors.

A batch has some 10,000 positions with 128 negatives each, but only a few thousand distinct items.  So logits are computed from
the distinct rows and an index, row by row in cache, instead of gathering [positions, negatives, D] numbers first.
"""

from __future__ import annotations

from typing import Any

import numba
import torch
from torch import Tensor
from torch.nn import functional

# One fixed vector order chosen at compile time: the same bits for the same input, which is all that exactness needs here.
_REASSOCIATE = {"reassoc", "contract"}


@numba.njit(nogil=True, cache=True, fastmath=_REASSOCIATE)
def _dots(queries, rows, index, out):  # type: ignore[no-untyped-def]
    for i in range(index.shape[0]):
        for k in range(index.shape[1]):
            row = index[i, k]
            total = out[i, k] * 0
            for d in range(queries.shape[1]):
                total += queries[i, d] * rows[row, d]
            out[i, k] = total


@numba.njit(nogil=True, cache=True)
def _dots_backward(grad, queries, rows, index, grad_queries, grad_rows):  # type: ignore[no-untyped-def]
    for i in range(index.shape[0]):
        for k in range(index.shape[1]):
            row = index[i, k]
            g = grad[i, k]
            for d in range(queries.shape[1]):
                grad_queries[i, d] += g * rows[row, d]
                grad_rows[row, d] += g * queries[i, d]


class IndexedDots(torch.autograd.Function):
    """out[i, k] = dot of queries[i] and rows[index[i, k]]."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(queries, rows, index)
        if queries.device.type != "cpu":
            return _dots_with_torch(queries, rows, index)
        out = torch.zeros(index.shape, dtype=queries.dtype)
        _dots(queries.numpy(), rows.numpy(), index.numpy(), out.numpy())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        queries, rows, index = ctx.saved_tensors
        grad = grads[0].contiguous()
        if queries.device.type != "cpu":
            return (*_dots_backward_with_torch(grad, queries, rows, index), None)
        grad_queries, grad_rows = torch.zeros_like(queries), torch.zeros_like(rows)
        _dots_backward(
            grad.numpy(), queries.numpy(), rows.numpy(), index.numpy(), grad_queries.numpy(), grad_rows.numpy()
        )
        return grad_queries, grad_rows, None


def _dots_with_torch(queries: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    return torch.einsum("nd,nkd->nk", queries, rows[index.long()])


def _dots_backward_with_torch(grad: Tensor, queries: Tensor, rows: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    grad_queries = torch.einsum("nk,nkd->nd", grad, rows[index.long()])
    flat = (grad[:, :, None] * queries[:, None, :]).flatten(0, 1)
    return grad_queries, torch.zeros_like(rows).index_add_(0, index.long().flatten(), flat)


def indexed_dots(queries: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    result: Tensor = IndexedDots.apply(queries.contiguous(), rows.contiguous(), index.contiguous())
    return result


def sampled_softmax_loss(
    queries: Tensor, rows: Tensor, target: Tensor, negatives: Tensor, temperature: float
) -> Tensor:
    """Mean over positions of -log p(target | target and negatives).  A negative equal to its target does not count."""
    index = torch.cat([target[:, None], negatives], dim=1)
    logits = indexed_dots(queries, rows, index) / temperature
    collides = functional.pad(negatives == target[:, None], (1, 0))
    logits = logits.masked_fill(collides, -5e4)
    return -functional.log_softmax(logits, dim=1)[:, 0].mean()
