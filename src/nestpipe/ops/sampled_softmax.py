"""Softmax over a target and its sampled negatives, without gathering the negatives' vectors.

A batch has some 10,000 positions with 128 negatives each, but only a few thousand distinct items.  So cosines are
computed from the distinct rows and an index, row by row in cache; a tensor [positions, negatives, D] never exists.
Lengths are divided out of the products, not out of the vectors, which would be a dozen passes over them.  A device goes
by segments of positions (`cosine_segments.py`).
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nestpipe.ops.cosine_segments import SHORTEST, SegmentedCosines
from nestpipe.ops.host import has_kernels
from nestpipe.ops.lookup import lookup
from nestpipe.ops.sharing import LOGITS, NEGATIVES, Sharing

EXCLUDED = -5e4
"""The logit of a negative that does not count: its share of a softmax is 0."""
IN_CACHE = 1 << 22
"""Bytes of rows whose gradients are added to as positions come.  Those of more are added up row by row, to the same bits."""


def sampled_softmax_loss(
    queries: Tensor,
    rows: Tensor,
    target: Tensor,
    negatives: Tensor,
    temperature: float,
    sharing: Sharing | None = None,
    log_q: Tensor | None = None,
) -> Tensor:
    """Mean of -log p(target | target and negatives), by cosines.  A negative equal to its target does not count.

    `sharing` adds the negatives of other positions.  `log_q` [rows] is the logarithm of each row's chance to be drawn,
    which is subtracted from its logit, the target's included.
    """
    own = negatives
    if sharing is not None and sharing.kind == NEGATIVES:
        negatives = torch.cat([own, *(own[other] for other in sharing.others)], dim=1)
    index = torch.cat([target[:, None], negatives], dim=1)
    logits = indexed_cosines(queries, rows, index) / temperature
    if log_q is not None:
        logits = logits - log_q[index.long()]
    collides = functional.pad(negatives == target[:, None], (1, 0))
    if sharing is not None and sharing.kind == NEGATIVES:
        collides[:, 1 + own.shape[1] :] |= _missing(sharing, own.shape[1])
    logits = logits.masked_fill(collides, EXCLUDED)
    if sharing is not None and sharing.kind == LOGITS:
        # Of every position's logits, each other position takes all but the target's.  No two take them for one turn.
        others = torch.cat([lookup(logits, other)[:, 1:] for other in sharing.others], dim=1)
        collides = torch.cat([own[other] == target[:, None] for other in sharing.others], dim=1)
        others = others.masked_fill(collides | _missing(sharing, own.shape[1]), EXCLUDED)
        logits = torch.cat([logits, others], dim=1)
    return -functional.log_softmax(logits, dim=1)[:, 0].mean()


def pooled_softmax_loss(
    queries: Tensor,
    rows: Tensor,
    target: Tensor,
    pool: Tensor,
    temperature: float,
    log_q: Tensor | None = None,
) -> Tensor:
    """As `sampled_softmax_loss`, of negatives [R] that all positions have in common: products of matrices."""
    positive = indexed_cosines(queries, rows, target[:, None])
    dtype = positive.dtype
    with torch.autocast(queries.device.type, enabled=False):
        unit = functional.normalize(queries.to(dtype), dim=1, eps=SHORTEST)
        vectors = functional.normalize(lookup(rows.to(dtype), pool.long()), dim=1, eps=SHORTEST)
        logits = torch.cat([positive, unit @ vectors.t()], dim=1) / temperature
    if log_q is not None:
        logits = logits - torch.cat([log_q[target.long()][:, None], log_q[pool.long()].expand(len(target), -1)], dim=1)
    collides = functional.pad(pool == target[:, None], (1, 0))
    return -functional.log_softmax(logits.masked_fill(collides, EXCLUDED), dim=1)[:, 0].mean()


def _missing(sharing: Sharing, each: int) -> Tensor:
    """[n, others * each]: True where a history is too short to have that other position."""
    others, positions = sharing.counts.shape
    return (~sharing.counts).t().unsqueeze(2).expand(positions, others, each).reshape(positions, others * each)


def indexed_cosines(queries: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """[n, k]: the cosine of queries[i] and rows[index[i, k]]."""
    if queries.shape[1] != rows.shape[1] or queries.shape[0] != index.shape[0]:
        shapes = ", ".join(str(list(t.shape)) for t in (queries, rows, index))
        raise ValueError(f"queries, rows and index of shapes {shapes} do not fit: need [n, D], [r, D] and [n, k]")
    dtype = torch.promote_types(queries.dtype, rows.dtype)
    queries, rows = queries.to(dtype), rows.to(dtype)
    if not has_kernels(queries):
        in_segments: Tensor = SegmentedCosines.apply(queries, rows, index)
        return in_segments
    found: Tensor = IndexedCosines.apply(queries.contiguous(), rows.contiguous(), index.contiguous())
    return found


def indexed_cosines_reference(queries: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    """`indexed_cosines` in torch operations."""
    queries, rows = (functional.normalize(vectors, dim=1, eps=SHORTEST) for vectors in (queries, rows))
    return torch.einsum("nd,nkd->nk", queries, lookup(rows, index.long()))


class IndexedCosines(torch.autograd.Function):
    """`indexed_cosines` by the kernels below."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        of_queries, of_rows = queries.new_empty(queries.shape[0]), rows.new_empty(rows.shape[0])
        _inverse_lengths(queries.numpy(), of_queries.numpy())
        _inverse_lengths(rows.numpy(), of_rows.numpy())
        out = queries.new_empty(index.shape)
        _cosines(queries.numpy(), rows.numpy(), index.numpy(), of_queries.numpy(), of_rows.numpy(), out.numpy())
        ctx.save_for_backward(out, queries, rows, index, of_queries, of_rows)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        saved = ctx.saved_tensors
        passed = torch.zeros_like(saved[1]), torch.zeros_like(saved[2])
        given = grads[0].contiguous().numpy(), *(t.detach().numpy() for t in saved), *(p.numpy() for p in passed)
        _cosines_backward(*given, saved[2].nbytes <= IN_CACHE)
        return *passed, None


# Kernels.  `reassoc` lets a sum run in vector lanes, in an order that is fixed when it is compiled: the same input
# gives the same bits.


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract"})
def _inverse_lengths(vectors, out):  # type: ignore[no-untyped-def]
    """out[i] = 1 / the length of vectors[i]."""
    for i in range(vectors.shape[0]):
        total = out.dtype.type(0)
        for d in range(vectors.shape[1]):
            total += vectors[i, d] * vectors[i, d]
        out[i] = 1 / max(np.sqrt(total), SHORTEST)


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract"})
def _cosines(queries, rows, index, of_queries, of_rows, out):  # type: ignore[no-untyped-def]
    """out[i, k] = the dot of queries[i] and rows[index[i, k]], times both inverse lengths."""
    for i in range(index.shape[0]):
        for k in range(index.shape[1]):
            row = index[i, k]
            total = out.dtype.type(0)
            for d in range(queries.shape[1]):
                total += queries[i, d] * rows[row, d]
            out[i, k] = total * (of_queries[i] * of_rows[row])


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _cosines_backward(grad, cosines, queries, rows, index, of_queries, of_rows, by_queries, by_rows, at_once):  # type: ignore[no-untyped-def]
    """Adds the gradients of both inputs.  A cosine's gradient by one vector is the other's direction, minus its part
    along the vector itself, over the vector's length.  `at_once`: both in one pass, for rows that are in cache."""
    along_rows = np.zeros(rows.shape[0], rows.dtype)
    for i in range(index.shape[0]):
        along = grad.dtype.type(0)
        for k in range(index.shape[1]):
            row = index[i, k]
            g = grad[i, k] * (of_queries[i] * of_rows[row])
            if at_once:
                for d in range(queries.shape[1]):
                    by_queries[i, d] += g * rows[row, d]
                    by_rows[row, d] += g * queries[i, d]
            else:
                for d in range(queries.shape[1]):
                    by_queries[i, d] += g * rows[row, d]
            along += grad[i, k] * cosines[i, k]
            along_rows[row] += grad[i, k] * cosines[i, k]
        _subtract_along(along, queries[i], of_queries[i], by_queries[i])
    if not at_once:
        _add_by_rows(grad, queries, index, of_queries, of_rows, by_rows)
    for row in range(rows.shape[0]):
        if along_rows[row] != 0:
            _subtract_along(along_rows[row], rows[row], of_rows[row], by_rows[row])


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def _add_by_rows(grad, queries, index, of_queries, of_rows, by_rows):  # type: ignore[no-untyped-def]
    """Adds to each row's gradient at once: pairs are sorted by row.  In the order of positions, so sums have the same bits."""
    ends = np.zeros(by_rows.shape[0] + 1, np.int64)
    for i in range(index.shape[0]):
        for k in range(index.shape[1]):
            ends[index[i, k] + 1] += 1
    for row in range(by_rows.shape[0]):
        ends[row + 1] += ends[row]
    positions, factors = np.empty(index.size, np.int64), np.empty(index.size, by_rows.dtype)
    for i in range(index.shape[0]):
        for k in range(index.shape[1]):
            row = index[i, k]
            positions[ends[row]], factors[ends[row]] = i, grad[i, k] * (of_queries[i] * of_rows[row])
            ends[row] += 1  # from where a row's pairs begin to where they end
    begin = 0
    for row in range(by_rows.shape[0]):
        for pair in range(begin, ends[row]):
            i, g = positions[pair], factors[pair]
            for d in range(queries.shape[1]):
                by_rows[row, d] += g * queries[i, d]
        begin = ends[row]


@numba.njit(nogil=True, error_model="numpy", fastmath={"contract"})
def _subtract_along(along, vector, inverse_length, grad):  # type: ignore[no-untyped-def]
    """Subtracts the part along `vector`, unless it is shorter than SHORTEST: then its length counts as fixed."""
    if inverse_length < 1 / SHORTEST:
        scale = along * inverse_length * inverse_length
        for d in range(vector.shape[0]):
            grad[d] -= scale * vector[d]
