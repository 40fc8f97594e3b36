"""What stands between attention and linear layers: activations, norms and gates, each one pass over its tokens.

Each is a few operations in plain torch (the references), and as many passes over memory, backward too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nestpipe.ops import gating_kernels as kernels
from nestpipe.ops.gating_kernels import EPS
from nestpipe.ops.host import has_kernels

Norm = Literal["layer", "rms"]


def split_silu(mixed: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    """silu(mixed) [T, sum of widths] as one tensor [T, w] for every width."""
    if not has_kernels(mixed):
        return tuple(part.contiguous() for part in functional.silu(mixed).split(list(widths), dim=1))
    found: tuple[Tensor, ...] = SplitSilu.apply(mixed, tuple(widths))
    return found


def gated_norm(x: Tensor, gate: Tensor | None, norm: Norm) -> Tensor:
    """norm(x) * gate, token by token; without a learned scale.  None: no gate."""
    if not has_kernels(x):
        return gated_norm_reference(x, gate, norm)
    found: Tensor = GatedNorm.apply(x, gate, norm == "layer")
    return found


def gated_norm_reference(x: Tensor, gate: Tensor | None, norm: Norm) -> Tensor:
    """`gated_norm` in torch operations."""
    if norm == "layer":
        normed = functional.layer_norm(x, x.shape[1:], eps=EPS)
    else:
        normed = x * torch.rsqrt(x.square().mean(1, keepdim=True) + EPS)
    return normed if gate is None else normed * gate


def silu_product(mixed: Tensor) -> Tensor:
    """silu(first half) * second half of [T, 2 w]: the middle of a SwiGLU layer."""
    if not has_kernels(mixed):
        first, second = mixed.chunk(2, dim=1)
        return functional.silu(first) * second
    found: Tensor = SiluProduct.apply(mixed)
    return found


class SplitSilu(torch.autograd.Function):
    """`split_silu` by the host's kernels."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
        mixed = mixed.contiguous()
        ctx.save_for_backward(mixed)
        parts = tuple(mixed.new_empty(mixed.shape[0], width) for width in widths)
        start = 0
        for part in parts:
            kernels.silu_columns(mixed.numpy(), start, part.numpy())
            start += part.shape[1]
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (mixed,) = ctx.saved_tensors
        passed, start = torch.empty_like(mixed), 0
        for grad in grads:
            kernels.silu_columns_backward(mixed.numpy(), start, grad.contiguous().numpy(), passed.numpy())
            start += grad.shape[1]
        return passed, None


class GatedNorm(torch.autograd.Function):
    """`gated_norm` by the host's kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor | None, centred: bool) -> Tensor:
        x = x.contiguous()
        gate = x.new_empty(0, 0) if gate is None else gate.contiguous()
        ctx.save_for_backward(x, gate)
        ctx.centred = centred
        out = torch.empty_like(x)
        kernels.gated_norm(x.numpy(), gate.numpy(), centred, out.numpy())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate = ctx.saved_tensors
        by_x, by_gate = torch.empty_like(x), torch.empty_like(gate)
        given = grads[0].contiguous(), x, gate
        kernels.gated_norm_backward(*(t.numpy() for t in given), ctx.centred, by_x.numpy(), by_gate.numpy())
        return by_x, by_gate if gate.shape[1] else None, None


class SiluProduct(torch.autograd.Function):
    """`silu_product` by the host's kernels."""

    @staticmethod
    def forward(ctx: Any, mixed: Tensor) -> Tensor:
        mixed = mixed.contiguous()
        ctx.save_for_backward(mixed)
        out = mixed.new_empty(mixed.shape[0], mixed.shape[1] // 2)
        kernels.silu_product(mixed.numpy(), out.numpy())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor]:
        (mixed,) = ctx.saved_tensors
        passed = torch.empty_like(mixed)
        kernels.silu_product_backward(grads[0].contiguous().numpy(), mixed.numpy(), passed.numpy())
        return (passed,)
