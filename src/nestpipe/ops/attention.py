"""HSTU's attention: the part of a block between its two linear layers, on tokens without padding.

With u, v, q, k = silu(mixed) and a = (scale * silu(q k' + bias), causal) v, the result is u * norm(a).  Plain torch
makes a dozen passes over all pairs of places, half of which the causal mask drops.  Here products go by blocks of
places, and a block ends at its last place, so most of that half is never computed.  Everything between two products is
one kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nestpipe.data.jagged import JaggedTensor
from nestpipe.ops import attention_kernels as kernels
from nestpipe.ops.host import has_kernels
from nestpipe.ops.relative_bias import relative_bias
from nestpipe.ops.triton_support import kernels_for

_BLOCK = 80
"""The most places of a block.  Small blocks skip more masked pairs, large ones multiply faster."""


def gated_attention(
    mixed: Tensor, by_place: Tensor, by_time: Tensor, bucket: Tensor, lengths: Tensor, heads: int, scale: float
) -> Tensor:
    """[T, H * w] for T tokens, from `mixed` [T, 4 * H * w]: u, v, q and k before silu, heads side by side.

    The bias of a pair of places is `by_place` at its distance (the first entry is looking back the farthest, the middle
    one is distance 0) plus `by_time` at its bucket in `bucket` [B, n, n].  `lengths` [B] are the samples' numbers of
    tokens, at most n.
    """
    dtype = functools.reduce(torch.promote_types, (by_place.dtype, by_time.dtype), mixed.dtype)
    mixed, by_place, by_time = mixed.to(dtype), by_place.to(dtype), by_time.to(dtype)
    if triton := kernels_for(mixed, "attention_triton"):
        by_triton: Tensor = triton.gated_attention(mixed, by_place, by_time, bucket, lengths, heads, scale)
        return by_triton
    if not has_kernels(mixed):
        return gated_attention_reference(mixed, by_place, by_time, bucket, lengths, heads, scale)
    _check(mixed, by_place, bucket, lengths)
    trains = torch.is_grad_enabled()  # always False inside an autograd function
    found: Tensor = GatedAttention.apply(mixed, by_place, by_time, bucket, lengths, heads, scale, trains)
    return found


def gated_attention_reference(
    mixed: Tensor, by_place: Tensor, by_time: Tensor, bucket: Tensor, lengths: Tensor, heads: int, scale: float
) -> Tensor:
    """`gated_attention` in torch operations, on padded samples."""
    samples, n = bucket.shape[:2]
    width = mixed.shape[1] // (4 * heads)
    u, *parts = functional.silu(mixed).view(-1, 4, heads * width).unbind(1)
    sample, place = JaggedTensor(mixed, lengths=lengths).places()
    padded = mixed.new_zeros(3, samples, n, heads * width)
    padded = padded.index_put((torch.arange(3, device=mixed.device)[:, None], sample, place), torch.stack(parts))
    v, q, k = padded.view(3, samples, n, heads, width).transpose(2, 3)
    scores = q @ k.mT + relative_bias(by_place, by_time, bucket, lengths)[:, None]
    weights = functional.silu(scores) * torch.tril(scores.new_full((n, n), scale))
    a = (weights @ v).transpose(1, 2).reshape(samples, n, heads * width)[sample, place]
    return u * functional.layer_norm(a, (heads * width,), eps=1e-6)


def _check(mixed: Tensor, by_place: Tensor, bucket: Tensor, lengths: Tensor) -> None:
    """Raises ValueError for shapes with which a kernel would read or write out of bounds."""
    samples, n = bucket.shape[:2]
    if lengths.numel() != samples or int(lengths.sum()) != mixed.shape[0] or 2 * n - 1 > by_place.numel():
        raise ValueError(
            f"attention over {mixed.shape[0]} tokens of {lengths.numel()} samples does not fit time buckets of "
            f"{samples} samples with {n} places, or {by_place.numel()} biases by place"
        )
    if samples and (int(lengths.min()) < 0 or int(lengths.max()) > n):
        raise ValueError(f"a sample has 0 to {n} tokens, not {int(lengths.min())} or {int(lengths.max())}")


class GatedAttention(torch.autograd.Function):
    """`gated_attention` by the host's kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        by_place: Tensor,
        by_time: Tensor,
        bucket: Tensor,
        lengths: Tensor,
        heads: int,
        scale: float,
        trains: bool,
    ) -> Tensor:
        mixed = mixed.contiguous()
        offsets = functional.pad(torch.cumsum(lengths, 0), (1, 0))
        samples, n = bucket.shape[:2]
        rows, width = samples * heads, mixed.shape[1] // (4 * heads)
        tokens, starts = mixed.numpy(), offsets.numpy()
        qkv = mixed.new_empty(3, rows, n, width)
        kernels.activate(tokens, starts, qkv.numpy())
        v, q, k = qkv
        weights, attended = mixed.new_empty(rows, n, n), mixed.new_empty(rows * n, width)
        slopes = torch.empty_like(weights) if trains else mixed.new_empty(0, n, n)
        size = _block_size(n)
        room = mixed.new_empty(rows * size * n)
        biases = by_place.detach().numpy(), by_time.detach().numpy(), bucket.numpy()
        filled = tokens.dtype.type(scale), weights.numpy(), slopes.numpy()
        for low, high in _blocks(n, size):
            scores = _of_pairs(room, rows, low, high)
            torch.bmm(q[:, low:high], k[:, :high].mT, out=scores)
            kernels.weigh(scores.numpy(), low, *biases, starts, *filled)
            torch.bmm(weights[:, low:high, :high], v[:, :high], out=_of_places(attended, rows, low, high))
        out = mixed.new_empty(mixed.shape[0], heads * width)
        kernels.gate(attended.numpy(), tokens, starts, n, size, out.numpy())
        ctx.save_for_backward(mixed, qkv, weights, slopes, attended, bucket, offsets)
        ctx.biases = by_place.shape[0], by_time.shape[0]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mixed, qkv, weights, slopes, attended, bucket, offsets = ctx.saved_tensors
        v, q, k = qkv
        rows, n, width = v.shape
        size, heads = _block_size(n), mixed.shape[1] // (4 * width)
        tokens, starts = mixed.numpy(), offsets.numpy()
        passed, by_attended = torch.empty_like(mixed), torch.empty_like(v)
        grad = grads[0].contiguous().numpy()
        kernels.gate_backward(grad, attended.numpy(), tokens, starts, size, passed.numpy(), by_attended.numpy())
        by_place, by_time = (torch.zeros(count, dtype=torch.float64) for count in ctx.biases)
        by_values, by_queries, by_keys = (mixed.new_empty(rows * n, width) for _ in range(3))
        by_scores, room = torch.empty_like(weights), mixed.new_empty(rows * size * n)
        known = slopes.numpy(), bucket.numpy(), starts
        summed = by_scores.numpy(), by_place.numpy(), by_time.numpy()
        for low, high in _blocks(n, size):
            by_weights = _of_pairs(room, rows, low, high)
            torch.bmm(by_attended[:, low:high], v[:, :high].mT, out=by_weights)
            kernels.weigh_backward(by_weights.numpy(), low, *known, *summed)
            torch.bmm(by_scores[:, low:high, :high], k[:, :high], out=_of_places(by_queries, rows, low, high))
        for low, high in _blocks(n, size):  # blocks of keys and values, which the places from `low` on look at
            torch.bmm(by_scores[:, low:, low:high].mT, q[:, low:], out=_of_places(by_keys, rows, low, high))
            torch.bmm(weights[:, low:, low:high].mT, by_attended[:, low:], out=_of_places(by_values, rows, low, high))
        blocked = by_values.numpy(), by_queries.numpy(), by_keys.numpy()
        kernels.activate_backward(tokens, starts, heads, size, n, *blocked, passed.numpy())
        return passed, by_place.to(mixed.dtype), by_time.to(mixed.dtype), None, None, None, None, None


def _block_size(n: int) -> int:
    """The size of a block: all blocks of a sample are of one size, as far as possible."""
    count = max(1, -(-n // _BLOCK))
    return max(1, -(-n // count))


def _blocks(n: int, size: int) -> list[tuple[int, int]]:
    return [(low, min(low + size, n)) for low in range(0, n, size)]


def _of_pairs(room: Tensor, rows: int, low: int, high: int) -> Tensor:
    """Memory for the scores of a block's places with all places up to its end."""
    return room[: rows * (high - low) * high].view(rows, high - low, high)


def _of_places(blocked: Tensor, rows: int, low: int, high: int) -> Tensor:
    """The matrices of a block in a blocked tensor."""
    return blocked[rows * low : rows * high].view(rows, high - low, blocked.shape[1])
