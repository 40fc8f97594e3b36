"""Kernels beside their references: kinds of floats, and how close sums in another order must be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

FLOATS = st.sampled_from([torch.float32, torch.float64])
CLOSE = {torch.float32: 1e-4, torch.float64: 1e-12}


def check_close(found: Iterable[Tensor], *others: Iterable[Tensor], looser: float = 1.0) -> None:
    """Each tensor is that of every other list, in dtype, shape and up to rounding: relative to its largest entry, or to
    1, the size of what goes in, where terms cancel and all entries are smaller."""
    for tensors in zip(found, *others, strict=True):
        first, *rest = (t.detach() for t in tensors)
        close = looser * CLOSE[first.dtype]
        for other in rest:
            assert other.dtype == first.dtype and other.shape == first.shape
            if other.numel():
                away, largest = (first - other).abs().max().item(), other.abs().max().item()
                assert away <= close * max(largest, 1.0), f"{away} away, where the largest entry is {largest}"


def with_gradients(out: Tensor, inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, inputs, grad)]
