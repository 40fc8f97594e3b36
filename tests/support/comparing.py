"""Kernels beside their references: kinds of floats, and how close sums in another order must be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from oracle import distance

FLOATS = st.sampled_from([torch.float32, torch.float64])


def check_close(found: Iterable[Tensor], *others: Iterable[Tensor], float64: float = 1e-12) -> None:
    """Each tensor is that of every other list, in dtype, shape and up to rounding, relative to the largest entry."""
    for tensors in zip(found, *others, strict=True):
        first, *rest = (t.detach() for t in tensors)
        close = float64 if first.dtype == torch.float64 else 1e-4
        for other in rest:
            assert other.dtype == first.dtype
            assert distance(first.numpy(), other.numpy()) <= close


def with_gradients(out: Tensor, inputs: Sequence[Tensor], grad: Tensor) -> list[Tensor]:
    return [out, *torch.autograd.grad(out, inputs, grad)]
