"""Dropout whose mask is a function of one drawn number, so that it is made in registers and never kept.

torch's own draws every number of a mask one after the other, and keeps the mask for the backward pass.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nestpipe.ops.host import has_kernels


def dropout(x: Tensor, share: float, training: bool) -> Tensor:
    """Zeroes a share of the values of x and scales the others up.  On the host one draw from torch's generator says which."""
    if not training or not share:
        return x
    if not has_kernels(x):
        return functional.dropout(x, share, training)
    drawn = int(torch.randint(-(2**63), 2**63 - 1, ()))
    found: Tensor = Dropout.apply(x, share, drawn)
    return found


class Dropout(torch.autograd.Function):
    """`dropout` by the kernel below, backward too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float, drawn: int) -> Tensor:
        ctx.drawn = share, drawn
        return _dropped(x, share, drawn)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _dropped(grads[0], *ctx.drawn), None, None


def _dropped(x: Tensor, share: float, drawn: int) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    least = np.uint32(min(2**32 - 1, round(share * 2**32)))
    _drop(
        x.view(-1).numpy(), np.uint64(drawn % 2**64), least, x.numpy().dtype.type(1 / (1 - share)), out.view(-1).numpy()
    )
    return out


@numba.njit(nogil=True, error_model="numpy")
def _mixed(h):  # type: ignore[no-untyped-def]
    """A hash of 32 bits in which every bit of the input changes every bit of the result half the time."""
    h = np.uint32(h ^ (h >> 16))  # numba makes 64 bits of every operation on 32
    h = np.uint32(h * np.uint32(0x7FEB352D))
    h = np.uint32(h ^ (h >> 15))
    h = np.uint32(h * np.uint32(0x846CA68B))
    return np.uint32(h ^ (h >> 16))


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _drop(x, drawn, least, scale, out):  # type: ignore[no-untyped-def]
    """out[i] = x[i] * scale, or 0 where the hash of i and the drawn number is below `least`."""
    first, second = np.uint32(drawn), np.uint32(drawn >> np.uint64(32))
    block = 1 << 20
    for start in range(0, x.shape[0], block):
        of_block = _mixed(np.uint32(second + np.uint32(start // block)))
        part, to = x[start : start + block], out[start : start + block]
        for i in range(part.shape[0]):
            h = _mixed(np.uint32(_mixed(np.uint32(np.uint32(i) + first)) ^ of_block))
            to[i] = part[i] * scale if h >= least else part.dtype.type(0)
