"""Attention over histories without padding, and with memory that is linear in their length.

One family.  Every pair of places of a history has a score q k', and biases by place and by time:

  SCORE_BIAS      HSTU:               scale * silu(q k' + bias) v
  THREE_CHANNELS  FuXi-alpha:         scale * silu(q k') v, bias by time * v and bias by place * v, side by side
  TWO_CHANNELS    FuXi-beta, -gamma:  bias by time * v and bias by place * v

A place looks at itself and at those before it.  On the host, tiles of pairs are made, weighed and multiplied in cache, and
made again in the backward pass (`attention_kernels`).  Plain torch on padded samples makes a dozen passes over all pairs,
half of which are masked.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nestpipe.data.jagged import JaggedTensor
from nestpipe.ops import attention_kernels as kernels
from nestpipe.ops.attention_blocks import attend_by_blocks, attend_by_blocks_backward
from nestpipe.ops.attention_kernels import SCORE_BIAS, THREE_CHANNELS, TWO_CHANNELS
from nestpipe.ops.attention_room import LANES, make_room
from nestpipe.ops.event_times import BUCKETS, PARAMETERS, THRESHOLDS, EventTimes
from nestpipe.ops.gating import gated_norm, gated_norm_reference, split_silu
from nestpipe.ops.gemm import tile_gemm
from nestpipe.ops.host import has_kernels
from nestpipe.ops.triton_support import kernels_for

CHANNELS = {SCORE_BIAS: 1, THREE_CHANNELS: 3, TWO_CHANNELS: 2}
ROWS, COLUMNS = 64, 256
"""Pairs of a tile: places that look back, and those that they look at.  Results depend on it in their last bits."""


@dataclass(frozen=True)
class Attention:
    """What an attention does with its pairs."""

    heads: int
    scale: float
    mode: int = SCORE_BIAS
    kind: int = BUCKETS
    """How `by_time` gives a pair's bias by time: `event_times`."""

    @property
    def channels(self) -> int:
        return CHANNELS[self.mode]


def gated_attention(
    mixed: Tensor, by_place: Tensor, by_time: Tensor, events: EventTimes, heads: int, scale: float
) -> Tensor:
    """[T, D] for T tokens, from `mixed` [T, 4 D]: with u, v, q, k = silu(mixed), u * norm(attention of q, k and v).

    This is HSTU's block between its two linear layers.
    """
    mixed, by_place, by_time = _promoted(mixed, by_place, by_time)
    if triton := kernels_for(mixed, "attention_triton"):
        by_triton: Tensor = triton.gated_attention(mixed, by_place, by_time, events, heads, scale)
        return by_triton
    u, v, q, k = split_silu(mixed, [mixed.shape[1] // 4] * 4)
    return gated_norm(jagged_attention(q, k, v, by_place, by_time, events, Attention(heads, scale)), u, "layer")


def gated_attention_reference(
    mixed: Tensor, by_place: Tensor, by_time: Tensor, events: EventTimes, heads: int, scale: float
) -> Tensor:
    """`gated_attention` in torch operations."""
    u, v, q, k = functional.silu(mixed).chunk(4, dim=1)
    a = jagged_attention_reference(q, k, v, by_place, by_time, events, Attention(heads, scale))
    return gated_norm_reference(a, u, "layer")


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    by_place: Tensor,
    by_time: Tensor,
    events: EventTimes,
    attention: Attention,
    queries: Tensor | None = None,
) -> Tensor:
    """[Q, channels * D] for the Q tokens of `q` [Q, D], which look at those of `k` and `v` [T, D].  Heads are side by side.

    `events` has the times of all T tokens.  `queries` [B] says for how many of its last places each history has queries:
    keys and values of those before come from a cache.  None: all of them.  Where a cache ends at a multiple of ROWS, a
    place's result has the same bits with and without one.  The middle of `by_place` is distance 0, its first entry looks
    back the farthest.  With TWO_CHANNELS, q and k are not looked at.
    """
    q, k, v, by_place, by_time = _promoted(q, k, v, by_place, by_time)
    _check(q, k, v, by_place, by_time, events, attention, queries)
    if not has_kernels(v):
        return jagged_attention_reference(q, k, v, by_place, by_time, events, attention, queries)
    starts = events.starts if queries is None else functional.pad(torch.cumsum(queries, 0), (1, 0))
    found: Tensor = JaggedAttention.apply(q, k, v, by_place, by_time, starts, events, attention)
    return found


def jagged_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    by_place: Tensor,
    by_time: Tensor,
    events: EventTimes,
    attention: Attention,
    queries: Tensor | None = None,
) -> Tensor:
    """`jagged_attention` in torch operations, on padded samples."""
    heads, n, lengths = attention.heads, events.longest, events.lengths
    sample, place = JaggedTensor(v, lengths=lengths).places()
    of_query, at_query = sample, place
    if queries is not None:
        of_query, at_query = JaggedTensor(v.new_empty(int(queries.sum())), lengths=queries).places()
        at_query = at_query + (lengths - queries)[of_query]

    def padded(tokens: Tensor, sample: Tensor, place: Tensor) -> Tensor:
        room = tokens.new_zeros(events.samples, n, tokens.shape[1]).index_put((sample, place), tokens)
        return room.view(events.samples, n, heads, tokens.shape[1] // heads).transpose(1, 2)

    values = padded(v, sample, place)
    of_time, of_place = events.weights(attention.kind, by_time), events.place_weights(by_place)
    weights = [] if attention.mode == SCORE_BIAS else [of_time[:, None], of_place[:, None]]
    if attention.mode != TWO_CHANNELS:
        scores = padded(q, of_query, at_query) @ padded(k, sample, place).mT
        if attention.mode == SCORE_BIAS:
            scores = scores + (of_time + of_place)[:, None]
        weights.insert(0, functional.silu(scores) * attention.scale * events.seen[:, None])
    found = [(weight @ values).transpose(1, 2).flatten(2)[of_query, at_query] for weight in weights]
    return torch.cat(found, dim=1)


def _promoted(*tensors: Tensor) -> tuple[Tensor, ...]:
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
    return tuple(t.to(dtype) for t in tensors)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    by_place: Tensor,
    by_time: Tensor,
    events: EventTimes,
    attention: Attention,
    queries: Tensor | None,
) -> None:
    """Raises ValueError for shapes with which a kernel would read or write out of bounds."""
    tokens = events.time.values().shape[0] - events.samples
    few = events.samples and int(events.time.lengths_on_host().min()) < 1
    scored = attention.mode != TWO_CHANNELS
    if few or v.dim() != 2 or v.shape[0] != tokens or (scored and k.shape != v.shape):
        raise ValueError(
            f"attention over keys {tuple(k.shape)} and values {tuple(v.shape)} does not fit times of {events.samples} "
            f"histories with {tokens} tokens: a history has one time more than tokens"
        )
    if queries is not None and (
        queries.shape != events.lengths.shape or bool(((queries < 0) | (queries > events.lengths)).any())
    ):
        raise ValueError("attention needs for each history between 0 queries and as many as it has tokens")
    wanted = tokens if queries is None else int(queries.sum())
    if scored and q.shape != (wanted, v.shape[1]):
        raise ValueError(f"attention needs queries of shape {(wanted, v.shape[1])}, not {tuple(q.shape)}")
    if 2 * events.longest - 1 > by_place.numel() or by_time.numel() != PARAMETERS[attention.kind]:
        raise ValueError(
            f"attention over histories of {events.longest} places does not fit {by_place.numel()} biases by place and "
            f"{by_time.numel()} by time: it needs {2 * events.longest - 1} or more, and {PARAMETERS[attention.kind]}"
        )
    if v.shape[1] % attention.heads:
        raise ValueError(f"{attention.heads} heads do not divide a width of {v.shape[1]}")


class JaggedAttention(torch.autograd.Function):
    """`jagged_attention` by the host's kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        by_place: Tensor,
        by_time: Tensor,
        starts: Tensor,
        events: EventTimes,
        attention: Attention,
    ) -> Tensor:
        saved = *(t.contiguous() for t in (q, k, v, by_place, by_time)), starts
        ctx.save_for_backward(*saved)
        ctx.events, ctx.attention = events, attention
        out = v.new_empty(int(starts[-1]), attention.channels * v.shape[1])
        given = _given(saved, events, attention)
        if gemm := tile_gemm(v.dtype):
            room = make_room(v, events.longest, ROWS, COLUMNS, forward=True)
            kernels.attend(gemm, *given, _sizes(), room, out.numpy())
        else:
            attend_by_blocks(*given, ROWS, out.numpy())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *biases, _ = ctx.saved_tensors
        passed = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        of_biases = [torch.zeros(bias.shape, dtype=torch.float64) for bias in biases]
        sums = tuple(t.numpy() for t in (*passed, *of_biases))
        grad = grads[0].contiguous().numpy()
        given = _given(ctx.saved_tensors, ctx.events, ctx.attention)
        if gemm := tile_gemm(v.dtype):
            room = make_room(v, ctx.events.longest, ROWS, COLUMNS, forward=False)
            kernels.attend_backward(gemm, *given, _sizes(), room, grad, sums)
        else:
            attend_by_blocks_backward(*given, ROWS, grad, sums)
        vectors = passed if ctx.attention.mode != TWO_CHANNELS else (None, None, passed[2])
        return *vectors, *(total.to(v.dtype) for total in of_biases), None, None, None


def _sizes() -> tuple[int, int, int]:
    """Rows and columns of a tile, and of what whole number those at a history's end have a multiple."""
    return ROWS, COLUMNS, math.gcd(ROWS, COLUMNS, LANES)


def _given(saved: tuple[Tensor, ...], events: EventTimes, attention: Attention) -> tuple[Any, Any, Any, int, int, Any]:
    """What both passes are given, as the kernels take it."""
    q, k, v, by_place, by_time, starts = (t.detach().numpy() for t in saved)
    pairs = events.time.values().contiguous().numpy(), THRESHOLDS, attention.kind, by_place, by_time
    scale = v.dtype.type(attention.scale)
    return (q, k, v), (starts, events.starts.numpy()), pairs, attention.mode, attention.heads, scale
