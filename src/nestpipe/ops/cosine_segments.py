"""`indexed_cosines` in torch operations, some positions at a time: for devices, where the numba kernels do not run.

The rows of a segment's negatives are gathered, used and dropped; the backward pass gathers them again.  A tensor
[positions, negatives, D] of the whole batch never exists.  Gradients of rows are summed segment by segment, each in the
order of its index.  Segments depend on shapes alone, so the same input gives the same bits under every schedule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.ops.rows import add_rows

SHORTEST = 1e-6
"""A shorter vector counts as one of this length."""
SEGMENT_BYTES = 32 << 20
"""Of the rows that are gathered at a time."""


class SegmentedCosines(torch.autograd.Function):
    """[n, k]: the cosine of queries[i] and rows[index[i, k]].  Under autocast too, in the type of its arguments."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        of_queries, of_rows = inverse_lengths(queries), inverse_lengths(rows)
        out = queries.new_empty(index.shape)
        with torch.autocast(queries.device.type, enabled=False):
            for span in segments(index, rows):
                out[span] = torch.bmm(_gathered(rows, index[span]), queries[span].unsqueeze(2)).squeeze(2)
        out *= _scales(of_queries, of_rows, index)
        ctx.save_for_backward(out, queries, rows, index, of_queries, of_rows)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        cosines, queries, rows, index, of_queries, of_rows = ctx.saved_tensors
        scaled, along = grads[0] * _scales(of_queries, of_rows, index), grads[0] * cosines
        by_queries, by_rows = torch.empty_like(queries), torch.zeros_like(rows)
        for span in segments(index, rows):
            part = scaled[span]
            by_queries[span] = torch.bmm(part.unsqueeze(1), _gathered(rows, index[span])).squeeze(1)
            uses = part.unsqueeze(2) * queries[span].unsqueeze(1)
            add_rows(uses.view(-1, rows.shape[1]), index[span].reshape(-1), by_rows)
        along_rows = rows.new_zeros(rows.shape[0], 1)
        add_rows(along.reshape(-1, 1), index.reshape(-1), along_rows)
        _subtract_along(along.sum(1), queries, of_queries, by_queries)
        _subtract_along(along_rows[:, 0], rows, of_rows, by_rows)
        return by_queries, by_rows, None


def segments(index: Tensor, rows: Tensor) -> Iterator[slice]:
    """Runs of positions whose gathered rows take at most SEGMENT_BYTES; at least one position each."""
    position = index.shape[1] * rows.shape[1] * rows.element_size()
    step = max(1, SEGMENT_BYTES // max(1, position))
    for start in range(0, index.shape[0], step):
        yield slice(start, start + step)


def inverse_lengths(vectors: Tensor) -> Tensor:
    return 1 / vectors.square().sum(1).sqrt().clamp_min(SHORTEST)


def _gathered(rows: Tensor, index: Tensor) -> Tensor:
    return rows.index_select(0, index.reshape(-1)).view(*index.shape, rows.shape[1])


def _scales(of_queries: Tensor, of_rows: Tensor, index: Tensor) -> Tensor:
    return of_rows.index_select(0, index.reshape(-1)).view(index.shape) * of_queries[:, None]


def _subtract_along(along: Tensor, vectors: Tensor, inverse: Tensor, grads: Tensor) -> None:
    """Subtracts the part along each vector, unless it is shorter than SHORTEST: then its length counts as fixed."""
    scale = torch.where(inverse < 1 / SHORTEST, along * inverse * inverse, 0)
    grads -= scale[:, None] * vectors
