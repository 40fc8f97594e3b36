"""Triton kernels of HSTU's attention: `gated_attention` on tokens without padding, forward and backward.

Tokens lie one after the other; sample b has those from offsets[b] to offsets[b + 1].  A row of `mixed` is a token's u, v,
q and k before silu, heads side by side.  Scores are made in tiles of places and again in every backward kernel, so that
nothing of a pair of places is kept; its time bucket is found from the times.  Products are IEEE float32, not TF32.

No atomics.  A program that sums gradients of biases writes its own row of partial sums, and a last kernel adds these
rows in a fixed order, in float64 (float32 on an Ascend NPU).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from nestpipe.ops.event_times import LOG_STEP, TIME_BUCKETS, EventTimes, thresholds_on
from nestpipe.ops.triton_math import TILE, divide, root, tile_of, tree_sum, wide_type

# Sizes and warps with which no kernel over pairs of places spills registers, on any device that we compile for.  A float32
# product without tensor cores needs many.
_BLOCK = 32
"""Places of a program; half as many of heads wider than _WIDE_HEAD."""
_WIDE_HEAD = 64
_STEP = 16
"""Places that a block is multiplied with at a time."""
_CHUNK = 16
"""Columns of queries, keys and values that go into a product at a time: the least that a product may have."""
_EPS: tl.constexpr = tl.constexpr(1e-6)
_BUCKETS: tl.constexpr = tl.constexpr(TIME_BUCKETS)
_PER_DOUBLING: tl.constexpr = tl.constexpr(math.log(2) / LOG_STEP)
"""Buckets for twice the time."""


def gated_attention(
    mixed: Tensor, by_place: Tensor, by_time: Tensor, events: EventTimes, heads: int, scale: float
) -> Tensor:
    """[T, H * w]: as `ops.attention.gated_attention`, for tensors of one dtype, float32 or float64."""
    tokens = events.time.values().shape[0] - events.samples
    if mixed.shape[0] != tokens or 2 * events.longest - 1 > by_place.numel() or by_time.numel() != TIME_BUCKETS + 1:
        raise ValueError(
            f"attention over {mixed.shape[0]} tokens does not fit times of {tokens}, the longest history of "
            f"{events.longest}, {by_place.numel()} biases by place or {by_time.numel()} by time"
        )
    found: Tensor = GatedAttention.apply(mixed, by_place, by_time, events, heads, scale)
    return found


class GatedAttention(torch.autograd.Function):
    """`gated_attention` by the kernels below."""

    @staticmethod
    def forward(
        ctx: Any, mixed: Tensor, by_place: Tensor, by_time: Tensor, events: EventTimes, heads: int, scale: float
    ) -> Tensor:
        mixed, by_place, by_time = (given.contiguous() for given in (mixed, by_place, by_time))
        times, offsets = events.time.values().contiguous(), events.starts
        attended = mixed.new_empty(mixed.shape[0], mixed.shape[1] // 4)
        out = torch.empty_like(attended)
        ctx.heads, ctx.scale, ctx.longest = heads, scale, events.longest
        ctx.save_for_backward(mixed, by_place, by_time, times, offsets, attended)
        if out.numel():
            pairs = _Pairs(mixed, by_place, by_time, times, offsets, events.longest, heads, scale)
            _attend[pairs.blocks, pairs.samples * heads](*pairs.given, attended, *pairs.meta, **pairs.options)
            rows, columns = _tokens(out)
            _gate[(triton.cdiv(out.shape[0], rows),)](
                attended, mixed, out, *out.shape, rows, columns, enable_fp_fusion=True
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mixed, by_place, by_time, times, offsets, attended = ctx.saved_tensors
        place_grad, time_grad = torch.zeros_like(by_place), torch.zeros_like(by_time)
        if not attended.numel():
            return torch.zeros_like(mixed), place_grad, time_grad, None, None, None
        pairs = _Pairs(mixed, by_place, by_time, times, offsets, ctx.longest, ctx.heads, ctx.scale)
        passed, by_attended = torch.empty_like(mixed), torch.empty_like(attended)
        rows, columns = _tokens(attended)
        _gate_backward[(triton.cdiv(attended.shape[0], rows),)](
            *(grads[0].contiguous(), attended, mixed, passed, by_attended),
            *(*attended.shape, rows, columns),
            enable_fp_fusion=True,
        )
        grid = pairs.blocks, pairs.samples * ctx.heads
        given = *pairs.given, by_attended, passed, *pairs.meta
        _queries_backward[grid](*given, **pairs.options | {"num_warps": 4})  # with two, sm_90 runs out of registers
        for kernel in (_keys_backward, _values_backward):
            kernel[grid](*given, **pairs.options)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            _bias_gradients(pairs, by_attended, place_grad, time_grad)
        return passed, place_grad, time_grad, None, None, None


class _Pairs:
    """What every kernel over pairs of places is given, and its compile-time sizes."""

    def __init__(
        self,
        mixed: Tensor,
        by_place: Tensor,
        by_time: Tensor,
        times: Tensor,
        offsets: Tensor,
        longest: int,
        heads: int,
        scale: float,
    ) -> None:
        self.samples = offsets.numel() - 1
        width = mixed.shape[1] // (4 * heads)
        d = max(_CHUNK, triton.next_power_of_2(width))
        self.block = _BLOCK if d <= _WIDE_HEAD else _BLOCK // 2
        self.blocks = triton.cdiv(longest, self.block)
        self.centre = (by_place.numel() - 1) // 2
        self.wide = wide_type(mixed)
        self.given = mixed, by_place, by_time, times, thresholds_on(mixed.device), offsets, self.centre
        self.meta = scale, heads, width, d, self.block, min(_STEP, self.block), _CHUNK
        self.options = {"num_warps": 2 if d <= _WIDE_HEAD else 4, "num_stages": 1, "enable_fp_fusion": True}


def _tokens(inner: Tensor) -> tuple[int, int]:
    """Tokens of a program that needs whole tokens, and the width of its tiles."""
    columns = triton.next_power_of_2(inner.shape[1])
    return tile_of(inner.shape[1], most=columns)


def _bias_gradients(pairs: _Pairs, by_attended: Tensor, place_grad: Tensor, time_grad: Tensor) -> None:
    """Fills the gradients of both biases."""
    programs, buckets = pairs.samples * pairs.blocks, time_grad.numel()
    dtype = torch.float32 if pairs.wide == tl.float32 else torch.float64
    by_distance = by_attended.new_zeros(programs, pairs.blocks * pairs.block, dtype=dtype)
    by_bucket = by_attended.new_zeros(programs, buckets, dtype=dtype)
    _biases_backward[pairs.blocks, pairs.samples](
        *(*pairs.given, by_attended, by_distance, by_bucket, buckets, *pairs.meta),
        *(pairs.wide, triton.next_power_of_2(buckets)),
        **pairs.options | {"num_warps": 8},
    )
    n = min(pairs.centre + 1, by_distance.shape[1])
    for parts, out, count, first, step in (
        (by_distance, place_grad, n, pairs.centre, -1),
        (by_bucket, time_grad, buckets, 0, 1),
    ):
        rows, columns = TILE // 32, 32
        _add_parts[(triton.cdiv(count, columns),)](
            *(parts, out, programs, count, parts.stride(0), first, step, rows, columns, rows.bit_length() - 1),
            enable_fp_fusion=False,
        )


@triton.jit
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _silu(x):  # type: ignore[no-untyped-def]
    return x * _sigmoid(x)


@triton.jit
def _slope(x):  # type: ignore[no-untyped-def]
    """The derivative of silu."""
    s = _sigmoid(x)
    return s + x * s * (1 - s)


@triton.jit
def _span(offsets, sample):  # type: ignore[no-untyped-def]
    """The first token of a sample, and its length."""
    start = tl.load(offsets + sample)
    return start, (tl.load(offsets + sample + 1) - start).to(tl.int32)


@triton.jit
def _place(token, part, head, d, HEADS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where in `mixed` columns d of a head's u (part 0), v (1), q (2) or k (3) of some tokens lie."""
    return token.to(tl.int64)[:, None] * (4 * HEADS * WIDTH) + (part * HEADS + head) * WIDTH + d[None, :]


@triton.jit
def _activated(  # type: ignore[no-untyped-def]
    mixed, token, there, part, head, d, HEADS: tl.constexpr, WIDTH: tl.constexpr
):
    """Columns d of a head's v (part 1), q (2) or k (3) of some tokens, after silu; zeros where there are none."""
    inside = there[:, None] & (d < WIDTH)[None, :]
    return _silu(tl.load(mixed + _place(token, part, head, d, HEADS, WIDTH), mask=inside, other=0.0))


@triton.jit
def _of_attended(  # type: ignore[no-untyped-def]
    by_attended, token, there, head, d, HEADS: tl.constexpr, WIDTH: tl.constexpr
):
    """Columns d of a head's gradient of `attended`."""
    at = token.to(tl.int64)[:, None] * (HEADS * WIDTH) + head * WIDTH + d[None, :]
    return tl.load(by_attended + at, mask=there[:, None] & (d < WIDTH)[None, :], other=0.0)


@triton.jit
def _product(x, y):  # type: ignore[no-untyped-def]
    return tl.dot(x, y, input_precision="ieee", out_dtype=x.dtype)


@triton.jit
def _bucket(gap, thresholds):  # type: ignore[no-untyped-def]
    """How many thresholds are at most `gap`: as its logarithm says, or one more or less."""
    found = (tl.log2(tl.maximum(gap, 1).to(tl.float32)) * _PER_DOUBLING).to(tl.int32)
    found = tl.minimum(found, _BUCKETS)
    below = tl.load(thresholds + tl.maximum(found - 1, 0))
    found = tl.where((found > 0) & (gap < below), found - 1, found)
    above = tl.load(thresholds + tl.minimum(found, _BUCKETS - 1))
    return tl.where((found < _BUCKETS) & (gap >= above), found + 1, found)


@triton.jit
def _pairs(times, thresholds, by_place, by_time, i, j, length, centre):  # type: ignore[no-untyped-def]
    """Of pairs of places (i, j), both two-dimensional: which look back, their time buckets and their biases."""
    seen = (j <= i) & (i < length)
    now, then = tl.load(times + i + 1, mask=i < length, other=0), tl.load(times + j, mask=j < length, other=0)
    gap = tl.maximum(now, then) - tl.minimum(now, then)
    gap = tl.where(gap < 0, 0x7FFFFFFFFFFFFFFF, gap)  # more than an int64 can hold
    found = tl.where(seen, _bucket(gap, thresholds), 0)
    near = tl.load(by_place + (centre + j - i), mask=seen, other=0.0)
    return seen, found, tl.load(by_time + found, mask=seen, other=0.0) + near


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    mixed,
    start,
    length,
    rows,
    columns,
    bias,
    ROWS_PART: tl.constexpr,
    COLUMNS_PART: tl.constexpr,
    head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """q k' + bias, or k q' + bias.  By chunks of what is summed over: whole queries and keys would fill the registers."""
    x = tl.zeros_like(bias)
    for low in range(0, D, CHUNK):
        d = low + tl.arange(0, CHUNK)
        left = _activated(mixed, start + rows, rows < length, ROWS_PART, head, d, HEADS, WIDTH)
        right = _activated(mixed, start + columns, columns < length, COLUMNS_PART, head, d, HEADS, WIDTH)
        x += _product(left, tl.trans(right))
    return x + bias


@triton.jit
def _by_weights(  # type: ignore[no-untyped-def]
    mixed,
    by_attended,
    start,
    length,
    i,
    j,
    like,
    TURNED: tl.constexpr,
    head,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The gradients of the weights of places i that look at places j, by chunks.  TURNED: a row per j."""
    found = tl.zeros_like(like)
    for low in range(0, D, CHUNK):
        d = low + tl.arange(0, CHUNK)
        grad = _of_attended(by_attended, start + i, i < length, head, d, HEADS, WIDTH)
        v = _activated(mixed, start + j, j < length, 1, head, d, HEADS, WIDTH)
        if TURNED:
            found += _product(v, tl.trans(grad))
        else:
            found += _product(grad, tl.trans(v))
    return found


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    mixed,
    by_place,
    by_time,
    times,
    thresholds,
    offsets,
    centre,
    attended,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """attended = (scale * silu(q k' + bias), causal) v, a program per block of places that look, sample and head."""
    sample, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    start, length = _span(offsets, sample)
    i, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    if tl.program_id(0) * BLOCK < length:
        total = tl.zeros((BLOCK, D), mixed.dtype.element_ty)
        for low in range(0, tl.minimum((tl.program_id(0) + 1) * BLOCK, length), STEP):
            j = low + tl.arange(0, STEP)
            seen, _, bias = _pairs(
                times + start + sample, thresholds, by_place, by_time, i[:, None], j[None, :], length, centre
            )
            x = _scores(mixed, start, length, i, j, bias, 2, 3, head, HEADS, WIDTH, D, CHUNK)
            v = _activated(mixed, start + j, j < length, 1, head, d, HEADS, WIDTH)
            total += _product(tl.where(seen, SCALE * _silu(x), 0.0), v)
        at = (start + i).to(tl.int64)[:, None] * (HEADS * WIDTH) + head * WIDTH + d[None, :]
        tl.store(attended + at, total, mask=(i < length)[:, None] & (d < WIDTH)[None, :])


@triton.jit
def _queries_backward(  # type: ignore[no-untyped-def]
    mixed,
    by_place,
    by_time,
    times,
    thresholds,
    offsets,
    centre,
    by_attended,
    passed,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Fills q's part of `passed`, a program per block of places that look, sample and head."""
    sample, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    start, length = _span(offsets, sample)
    i, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    if tl.program_id(0) * BLOCK < length:
        total = tl.zeros((BLOCK, D), mixed.dtype.element_ty)
        for low in range(0, tl.minimum((tl.program_id(0) + 1) * BLOCK, length), STEP):
            j = low + tl.arange(0, STEP)
            seen, _, bias = _pairs(
                times + start + sample, thresholds, by_place, by_time, i[:, None], j[None, :], length, centre
            )
            x = _scores(mixed, start, length, i, j, bias, 2, 3, head, HEADS, WIDTH, D, CHUNK)
            by_weight = _by_weights(mixed, by_attended, start, length, i, j, x, False, head, HEADS, WIDTH, D, CHUNK)
            k = _activated(mixed, start + j, j < length, 3, head, d, HEADS, WIDTH)
            total += _product(tl.where(seen, by_weight * (SCALE * _slope(x)), 0.0), k)
        _pass_on(mixed, passed, total, start + i, i < length, 2, head, d, HEADS, WIDTH)


@triton.jit
def _keys_backward(  # type: ignore[no-untyped-def]
    mixed,
    by_place,
    by_time,
    times,
    thresholds,
    offsets,
    centre,
    by_attended,
    passed,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Fills k's part of `passed`, a program per block of places that are looked at, sample and head."""
    sample, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    start, length = _span(offsets, sample)
    j, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    if tl.program_id(0) * BLOCK < length:
        total = tl.zeros((BLOCK, D), mixed.dtype.element_ty)
        for low in range(tl.program_id(0) * BLOCK, length, STEP):
            i = low + tl.arange(0, STEP)
            seen, _, bias = _pairs(
                times + start + sample, thresholds, by_place, by_time, i[None, :], j[:, None], length, centre
            )
            x = _scores(mixed, start, length, j, i, bias, 3, 2, head, HEADS, WIDTH, D, CHUNK)
            by_weight = _by_weights(mixed, by_attended, start, length, i, j, x, True, head, HEADS, WIDTH, D, CHUNK)
            q = _activated(mixed, start + i, i < length, 2, head, d, HEADS, WIDTH)
            total += _product(tl.where(seen, by_weight * (SCALE * _slope(x)), 0.0), q)
        _pass_on(mixed, passed, total, start + j, j < length, 3, head, d, HEADS, WIDTH)


@triton.jit
def _values_backward(  # type: ignore[no-untyped-def]
    mixed,
    by_place,
    by_time,
    times,
    thresholds,
    offsets,
    centre,
    by_attended,
    passed,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Fills v's part of `passed`, a program per block of places that are looked at, sample and head."""
    sample, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    start, length = _span(offsets, sample)
    j, d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, D)
    if tl.program_id(0) * BLOCK < length:
        total = tl.zeros((BLOCK, D), mixed.dtype.element_ty)
        for low in range(tl.program_id(0) * BLOCK, length, STEP):
            i = low + tl.arange(0, STEP)
            seen, _, bias = _pairs(
                times + start + sample, thresholds, by_place, by_time, i[None, :], j[:, None], length, centre
            )
            x = _scores(mixed, start, length, j, i, bias, 3, 2, head, HEADS, WIDTH, D, CHUNK)
            grad = _of_attended(by_attended, start + i, i < length, head, d, HEADS, WIDTH)
            total += _product(tl.where(seen, SCALE * _silu(x), 0.0), grad)
        _pass_on(mixed, passed, total, start + j, j < length, 1, head, d, HEADS, WIDTH)


@triton.jit
def _pass_on(  # type: ignore[no-untyped-def]
    mixed, passed, grad, token, there, part, head, d, HEADS: tl.constexpr, WIDTH: tl.constexpr
):
    """Passes the gradient of a part through silu and stores it."""
    at, inside = _place(token, part, head, d, HEADS, WIDTH), there[:, None] & (d < WIDTH)[None, :]
    tl.store(passed + at, grad * _slope(tl.load(mixed + at, mask=inside, other=0.0)), mask=inside)


@triton.jit
def _biases_backward(  # type: ignore[no-untyped-def]
    mixed,
    by_place,
    by_time,
    times,
    thresholds,
    offsets,
    centre,
    by_attended,
    by_distance,
    by_bucket,
    buckets,
    SCALE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    """Sums the scores' gradients by distance and by time bucket, a program per block of places that look and sample.

    A tile `back` blocks before the diagonal has distances from (back - 1) * BLOCK + 1 to (back + 1) * BLOCK - 1.  Column
    t of the turned tile has those that are t modulo BLOCK: the lower ones end a block of distances that the tile before
    began, the upper ones begin the next.
    """
    sample = tl.program_id(1)
    start, length = _span(offsets, sample)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) * BLOCK < length:
        row = (sample * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
        r, t = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
        slot = tl.arange(0, BUCKETS)
        of_bucket, begun = tl.zeros((BUCKETS,), WIDE), tl.zeros((BLOCK,), WIDE)
        distances = by_distance + row * (tl.num_programs(0) * BLOCK) + tl.arange(0, BLOCK)
        for back in range(0, tl.program_id(0) + 1):
            j = (tl.program_id(0) - back) * BLOCK + tl.arange(0, BLOCK)
            seen, found, bias = _pairs(
                times + start + sample, thresholds, by_place, by_time, i[:, None], j[None, :], length, centre
            )
            total = tl.zeros((BLOCK, BLOCK), mixed.dtype.element_ty)
            for head in range(0, HEADS):
                x = _scores(mixed, start, length, i, j, bias, 2, 3, head, HEADS, WIDTH, D, CHUNK)
                by_weight = _by_weights(mixed, by_attended, start, length, i, j, x, False, head, HEADS, WIDTH, D, CHUNK)
                total += tl.where(seen, by_weight * (SCALE * _slope(x)), 0.0)
            turned = tl.gather(total, (r - t) & (BLOCK - 1), 1)
            ended = begun + tl.sum(tl.where(r < t, turned, 0.0), 0).to(WIDE)
            begun = tl.sum(tl.where(r < t, 0.0, turned), 0).to(WIDE)
            if back > 0:
                tl.store(distances + (back - 1) * BLOCK, ended)
            least, most = tl.min(tl.where(seen, found, BUCKETS)), tl.max(tl.where(seen, found, 0))
            for one in range(least, most + 1):
                of_one = tl.sum(tl.where(found == one, total, 0.0)).to(WIDE)
                of_bucket += tl.where(slot == one, of_one, 0.0)
        tl.store(distances + tl.program_id(0) * BLOCK, begun)
        tl.store(by_bucket + row * buckets + slot, of_bucket, mask=slot < buckets)


@triton.jit
def _add_parts(  # type: ignore[no-untyped-def]
    parts,
    out,
    count,
    width,
    stride,
    first,
    step,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """out[first + step * c] = the sum of column c of `parts`."""
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS, ROWS), parts.dtype.element_ty)
    for low in range(0, count, ROWS):
        p = low + tl.arange(0, ROWS)
        inside = (c < width)[:, None] & (p < count)[None, :]
        total += tl.load(parts + p.to(tl.int64)[None, :] * stride + c[:, None], mask=inside, other=0.0)
    found = tree_sum(total, COLUMNS, LEVELS).to(out.dtype.element_ty)
    tl.store(out + first + step * c, found, mask=c < width)


@triton.jit
def _normed(attended, at, inside, count, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Layer norm of whole tokens, and one over their standard deviation."""
    a = tl.load(attended + at, mask=inside, other=0.0)
    mean = tl.sum(a, 1) / count
    away = tl.where(inside, a - mean[:, None], 0.0)
    scale = divide(tl.full((), 1.0, a.dtype), root(tl.sum(away * away, 1) / count + _EPS))
    return away * scale[:, None], scale


@triton.jit
def _gate(attended, mixed, out, tokens, inner, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = silu(u) * norm(a), a program per block of tokens."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, COLUMNS)
    inside = (i < tokens)[:, None] & (d < inner)[None, :]
    at = i[:, None] * inner + d[None, :]
    normed, _ = _normed(attended, at, inside, inner, COLUMNS)
    u = tl.load(mixed + i[:, None] * (4 * inner) + d[None, :], mask=inside, other=0.0)
    tl.store(out + at, _silu(u) * normed, mask=inside)


@triton.jit
def _gate_backward(  # type: ignore[no-untyped-def]
    grad, attended, mixed, passed, by_attended, tokens, inner, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Fills u's part of `passed`, and `by_attended`, a program per block of tokens."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, COLUMNS)
    inside = (i < tokens)[:, None] & (d < inner)[None, :]
    at, at_u = i[:, None] * inner + d[None, :], i[:, None] * (4 * inner) + d[None, :]
    normed, scale = _normed(attended, at, inside, inner, COLUMNS)
    g = tl.load(grad + at, mask=inside, other=0.0)
    u = tl.load(mixed + at_u, mask=inside, other=0.0)
    tl.store(passed + at_u, g * normed * _slope(u), mask=inside)
    by_normed = g * _silu(u)
    mean, along = tl.sum(by_normed, 1) / inner, tl.sum(by_normed * normed, 1) / inner
    by_token = (by_normed - mean[:, None] - normed * along[:, None]) * scale[:, None]
    tl.store(by_attended + at, by_token, mask=inside)
