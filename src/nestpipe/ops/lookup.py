"""Rows of a dense table by index, whose gradient is summed in a fixed order on a device too.

torch's own backward passes of `embedding` and of indexing may add by atomics there, in an order of the device's choice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nestpipe.ops.rows import add_rows


def lookup(table: Tensor, index: Tensor) -> Tensor:
    """table[index]: [..., D] for a table [R, D], [...] for a table [R]."""
    if table.is_cpu:
        return functional.embedding(index, table) if table.dim() == 2 else table[index]
    rows = table if table.dim() == 2 else table[:, None]
    found: Tensor = FixedLookup.apply(rows, index)
    return found if table.dim() == 2 else found.squeeze(-1)


class FixedLookup(torch.autograd.Function):
    """On a device: the gradient of a row is the sum of its uses, in the order of `index`."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = table.shape
        return table.index_select(0, index.reshape(-1)).view(*index.shape, table.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        summed = grads[0].new_zeros(ctx.shape)
        add_rows(grads[0].reshape(-1, ctx.shape[1]), index.reshape(-1), summed)
        return summed, None
