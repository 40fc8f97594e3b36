"""Attention of candidates to the history of their request, and to themselves; no candidate sees another one.

The family is that of `attention`.  Candidates of a request stand at one place, the one after its history, and at one time,
that of the request.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nestpipe.data.jagged import JaggedTensor
from nestpipe.ops import candidate_kernels as kernels
from nestpipe.ops.attention import Attention, jagged_attention
from nestpipe.ops.attention_kernels import SCORE_BIAS, TWO_CHANNELS
from nestpipe.ops.event_times import BUCKETS, POWER, THRESHOLDS, EventTimes, thresholds_on
from nestpipe.ops.gemm import blas_gemm
from nestpipe.ops.host import has_kernels
from nestpipe.ops.lookup import lookup

ROWS, COLUMNS, LANES = 64, 256, 16
"""Candidates and history places of a tile; a row of a tile begins at a multiple of so many numbers."""


def ranking_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    by_place: Tensor,
    by_time: Tensor,
    events: EventTimes,
    candidates: JaggedTensor,
    attention: Attention,
) -> Tensor:
    """[T + C, channels * D] for T tokens of histories, then C candidates: those of `candidates`, request by request.

    A token looks at itself and at those before it, a candidate at all of its history and at itself.
    """
    history = q.shape[0] - candidates.values().shape[0]
    (q, own_q), (k, own_k), (v, own_v) = (t.tensor_split([history]) for t in (q, k, v))
    over = jagged_attention(q, k, v, by_place, by_time, events, attention)
    own = candidate_attention(own_q, own_k, own_v, k, v, by_place, by_time, events, candidates, attention)
    return torch.cat([over, own])


def candidate_attention(
    q: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    k: Tensor,
    v: Tensor,
    by_place: Tensor,
    by_time: Tensor,
    events: EventTimes,
    candidates: JaggedTensor,
    attention: Attention,
) -> Tensor:
    """[C, channels * D] for the candidates q, own_k, own_v [C, D], which look at the tokens k and v [T, D] and themselves.

    `candidates` says how many each request has.  The middle of `by_place` is distance 0: it needs an entry for the distance
    from the place after a history to its first one.
    """
    if 2 * events.longest + 1 > by_place.numel():
        raise ValueError(
            f"candidates after histories of {events.longest} places need {2 * events.longest + 1} biases by place, not "
            f"{by_place.numel()}"
        )
    if q.shape[0] != int(candidates.lengths_on_host().sum()) or candidates.lengths().numel() != events.samples:
        raise ValueError(f"{q.shape[0]} candidates of {events.samples} requests do not fit the lengths of `candidates`")
    given = (q, own_k, own_v, k, v, by_place, by_time)
    if not has_kernels(v) or blas_gemm(v.dtype) is None:
        return candidate_attention_reference(*given, events, candidates, attention)
    found: Tensor = CandidateAttention.apply(*given, candidates.offsets(), events, attention)
    return found


def candidate_attention_reference(
    q: Tensor,
    own_k: Tensor,
    own_v: Tensor,
    k: Tensor,
    v: Tensor,
    by_place: Tensor,
    by_time: Tensor,
    events: EventTimes,
    candidates: JaggedTensor,
    attention: Attention,
) -> Tensor:
    """`candidate_attention` in torch operations, on padded requests."""
    heads, d, n = attention.heads, v.shape[1], events.longest
    sample, place = JaggedTensor(v, lengths=events.lengths).places()
    request, number = candidates.places()
    most = int(candidates.lengths_on_host().max()) if events.samples else 0

    def by_head(tokens: Tensor) -> Tensor:
        return tokens.view(*tokens.shape[:-1], heads, d // heads)

    def padded(tokens: Tensor, sample: Tensor, place: Tensor, longest: int) -> Tensor:
        room = tokens.new_zeros(events.samples, longest, d).index_put((sample, place), tokens)
        return by_head(room).transpose(1, 2)

    values = padded(v, sample, place, n)
    of_time, of_place = _request_weights(by_place, by_time, events, attention.kind)
    own_time, own_place = _own_weights(by_place, by_time, attention.kind)
    own_values = by_head(own_v)

    def joined(pairs: Tensor, own: Tensor) -> Tensor:
        """What candidates take from their history [B, heads, most, width], and from themselves."""
        return (pairs.transpose(1, 2)[request, number] + own).flatten(1)

    found = []
    if attention.mode != TWO_CHANNELS:
        scores = padded(q, request, number, most) @ padded(k, sample, place, n).mT
        own = (by_head(q) * by_head(own_k)).sum(-1)
        if attention.mode == SCORE_BIAS:
            scores, own = scores + (of_time + of_place)[:, None, None], own + (own_time + own_place)
        seen = (torch.arange(n, device=v.device) < events.lengths[:, None])[:, None, None]
        weights = functional.silu(scores) * attention.scale * seen
        found.append(joined(weights @ values, (functional.silu(own) * attention.scale)[..., None] * own_values))
    if attention.mode != SCORE_BIAS:
        for of_history, of_self in ((of_time, own_time), (of_place, own_place)):
            shared = of_history[:, None, None] @ values
            found.append(joined(shared.expand(-1, -1, most, -1), of_self * own_values))
    return torch.cat(found, dim=1)


def _request_weights(by_place: Tensor, by_time: Tensor, events: EventTimes, kind: int) -> tuple[Tensor, Tensor]:
    """[B, n] each: what a candidate's pairs weigh by time and by place, 0 behind the end of a history."""
    times, n = events.time.to_padded_dense(events.longest + 1), events.longest
    now = torch.gather(times, 1, events.lengths[:, None])
    steps = torch.arange(n, device=times.device)
    seen = steps < events.lengths[:, None]
    gap = torch.maximum(now, times[:, :n]) - torch.minimum(now, times[:, :n])
    gap = torch.where(gap < 0, torch.iinfo(torch.int64).max, gap) * seen
    distance = ((by_place.shape[0] - 1) // 2 + steps - events.lengths[:, None]).clamp(0, by_place.shape[0] - 1)
    return _time_weights(by_time, gap, kind) * seen, lookup(by_place, distance) * seen


def _own_weights(by_place: Tensor, by_time: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """Of a candidate and itself: no time and no place between them."""
    none = torch.zeros(1, dtype=torch.int64, device=by_time.device)
    return _time_weights(by_time, none, kind)[0], by_place[(by_place.shape[0] - 1) // 2]


def _time_weights(by_time: Tensor, gap: Tensor, kind: int) -> Tensor:
    if kind == BUCKETS:
        return lookup(by_time, torch.bucketize(gap, thresholds_on(gap.device), right=True))
    seconds = gap.to(by_time.dtype)
    if kind == POWER:
        a, b = by_time.unbind()
        return a * torch.exp(-b * torch.log(1 + seconds))
    a, b, c = by_time.unbind()
    return a * torch.exp(-c * torch.where(seconds > 0, torch.exp(b * torch.log(seconds.clamp_min(1))), 0))


class CandidateAttention(torch.autograd.Function):
    """`candidate_attention` by the host's kernels."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *tensors, starts, events, attention = given
        saved = *(t.contiguous() for t in tensors), starts
        ctx.save_for_backward(*saved)
        ctx.events, ctx.attention = events, attention
        v = saved[4]
        step = -(-v.shape[1] // LANES) * LANES
        sizes = (ROWS, COLUMNS), (ROWS, step), (ROWS, step), (COLUMNS, step), (step, COLUMNS)
        out = v.new_empty(saved[0].shape[0], attention.channels * v.shape[1])
        room = tuple(v.new_empty(size).numpy() for size in sizes)
        kernels.attend_candidates(*_given(saved, events, attention), room, out.numpy())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *vectors, by_place, by_time, _ = ctx.saved_tensors
        v = vectors[4]
        step = -(-v.shape[1] // LANES) * LANES
        pairs, few, many, turned = (ROWS, COLUMNS), (ROWS, step), (COLUMNS, step), (step, COLUMNS)
        sizes = pairs, pairs, (COLUMNS, ROWS), few, few, few, many, many, turned, turned
        room = tuple(v.new_empty(size).numpy() for size in sizes)
        passed = [torch.zeros_like(t) for t in vectors]
        of_biases = [torch.zeros(bias.shape, dtype=torch.float64) for bias in (by_place, by_time)]
        kernels.attend_candidates_backward(
            *_given(ctx.saved_tensors, ctx.events, ctx.attention),
            room,
            grads[0].contiguous().numpy(),
            tuple(t.numpy() for t in (*passed, *of_biases)),
        )
        if ctx.attention.mode == TWO_CHANNELS:
            passed[0] = passed[1] = passed[3] = None
        return *passed, *(total.to(v.dtype) for total in of_biases), None, None, None


def _given(saved: tuple[Tensor, ...], events: EventTimes, attention: Attention) -> tuple[Any, ...]:
    """What both passes are given, as the kernels take it."""
    *vectors, by_place, by_time, starts = (t.detach().numpy() for t in saved)
    pairs = events.time.values().contiguous().numpy(), THRESHOLDS, attention.kind, by_place, by_time
    both = starts, events.starts.numpy()
    scale = vectors[4].dtype.type(attention.scale)
    return blas_gemm(saved[4].dtype), tuple(vectors), both, pairs, attention.mode, attention.heads, scale
