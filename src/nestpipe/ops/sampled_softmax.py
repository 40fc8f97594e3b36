"""Softmax over a target and its sampled negatives, without ever laying out the negatives' vectors.

A batch has some 10,000 positions with 128 negatives each, but only a few thousand distinct items.  So logits are computed from
the distinct rows and an index, row by row in cache, instead of gathering [positions, negatives, D] numbers first; and lengths
are divided out of the products, not of the vectors, which would be a dozen passes over them, forth and back.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

# One fixed vector order chosen at compile time: the same bits for the same input, which is all that exactness needs here.
_REASSOCIATE = {"reassoc", "contract"}
SHORTEST = 1e-6
"""A vector shorter than this counts as one of this length."""


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=_REASSOCIATE)
def _shares(vectors, out):  # type: ignore[no-untyped-def]
    """out[i] = 1 / the length of vectors[i]."""
    for i in range(vectors.shape[0]):
        total = out.dtype.type(0)
        for d in range(vectors.shape[1]):
            total += vectors[i, d] * vectors[i, d]
        out[i] = 1 / max(np.sqrt(total), SHORTEST)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=_REASSOCIATE)
def _cosines(queries, rows, index, of_queries, of_rows, out):  # type: ignore[no-untyped-def]
    for i in range(index.shape[0]):
        for k in range(index.shape[1]):
            row = index[i, k]
            total = out.dtype.type(0)
            for d in range(queries.shape[1]):
                total += queries[i, d] * rows[row, d]
            out[i, k] = total * (of_queries[i] * of_rows[row])


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _cosines_backward(grad, cosines, queries, rows, index, of_queries, of_rows, by_queries, by_rows):  # type: ignore[no-untyped-def]
    """The gradient of a cosine by a vector: the other's direction, less what lies along its own, over its length."""
    along_rows = np.zeros(rows.shape[0], rows.dtype)
    for i in range(index.shape[0]):
        along = grad.dtype.type(0)
        for k in range(index.shape[1]):
            row = index[i, k]
            g = grad[i, k] * (of_queries[i] * of_rows[row])
            for d in range(queries.shape[1]):
                by_queries[i, d] += g * rows[row, d]
                by_rows[row, d] += g * queries[i, d]
            along += grad[i, k] * cosines[i, k]
            along_rows[row] += grad[i, k] * cosines[i, k]
        _leave_out(along, queries[i], of_queries[i], by_queries[i])
    for row in range(rows.shape[0]):
        if along_rows[row] != 0:
            _leave_out(along_rows[row], rows[row], of_rows[row], by_rows[row])


@numba.njit(nogil=True, error_model="numpy", fastmath={"contract"})
def _leave_out(along, vector, share, grad):  # type: ignore[no-untyped-def]
    if share < 1 / SHORTEST:  # else its length counts as fixed
        scale = along * share * share
        for d in range(vector.shape[0]):
            grad[d] -= scale * vector[d]


class IndexedCosines(torch.autograd.Function):
    """out[i, k] = the cosine of queries[i] and rows[index[i, k]]."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        of_queries, of_rows = queries.new_empty(queries.shape[0]), rows.new_empty(rows.shape[0])
        _shares(queries.numpy(), of_queries.numpy())
        _shares(rows.numpy(), of_rows.numpy())
        out = queries.new_empty(index.shape)
        _cosines(queries.numpy(), rows.numpy(), index.numpy(), of_queries.numpy(), of_rows.numpy(), out.numpy())
        ctx.save_for_backward(out, queries, rows, index, of_queries, of_rows)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        saved = ctx.saved_tensors
        passed = torch.zeros_like(saved[1]), torch.zeros_like(saved[2])
        _cosines_backward(
            grads[0].contiguous().numpy(), *(t.detach().numpy() for t in saved), *(p.numpy() for p in passed)
        )
        return *passed, None


def _cosines_with_torch(queries: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """What a device runs (written, not yet run on one)."""
    queries, rows = (functional.normalize(vectors, dim=1, eps=SHORTEST) for vectors in (queries, rows))
    return torch.einsum("nd,nkd->nk", queries, functional.embedding(index.long(), rows))


def indexed_cosines(queries: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """The cosine of queries[i] and rows[index[i, k]], for all i and k."""
    if queries.shape[1] != rows.shape[1] or queries.shape[0] != index.shape[0]:
        shapes = ", ".join(str(list(t.shape)) for t in (queries, rows, index))
        raise ValueError(f"queries, rows and index of shapes {shapes} do not fit: [n, D], [r, D], [n, k]")
    kind = torch.promote_types(queries.dtype, rows.dtype)
    queries, rows = queries.to(kind), rows.to(kind)
    if queries.device.type == "cpu" and kind in (torch.float32, torch.float64):
        found: Tensor = IndexedCosines.apply(queries.contiguous(), rows.contiguous(), index.contiguous())
        return found
    return _cosines_with_torch(queries, rows, index)


def sampled_softmax_loss(
    queries: Tensor, rows: Tensor, target: Tensor, negatives: Tensor, temperature: float
) -> Tensor:
    """Mean over positions of -log p(target | it and its negatives), by cosines; a negative equal to its target does not count."""
    index = torch.cat([target[:, None], negatives], dim=1)
    logits = indexed_cosines(queries, rows, index) / temperature
    collides = functional.pad(negatives == target[:, None], (1, 0))
    logits = logits.masked_fill(collides, -5e4)
    return -functional.log_softmax(logits, dim=1)[:, 0].mean()
