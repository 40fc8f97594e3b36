"""Candidates that look at histories: the kernels against plain torch, float64, forward and backward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from histories import some_events
from nestpipe.data.jagged import JaggedTensor
from nestpipe.ops.attention import SCORE_BIAS, THREE_CHANNELS, TWO_CHANNELS, Attention
from nestpipe.ops.candidate_attention import candidate_attention, candidate_attention_reference
from nestpipe.ops.event_times import BUCKETS, DECAY, PARAMETERS, POWER, EventTimes


def drawn(
    lengths: list[int], counts: list[int], dim: int, kind: int, spread: int, in_order: bool = True
) -> tuple[list[Tensor], EventTimes, JaggedTensor]:
    events = some_events(lengths, spread, in_order)
    tokens, asked = sum(lengths), sum(counts)
    sizes = [(asked, dim)] * 3 + [(tokens, dim)] * 2 + [(2 * max(lengths, default=0) + 1,), (PARAMETERS[kind],)]
    tensors = [torch.randn(size, dtype=torch.float64) for size in sizes]
    if kind != BUCKETS:
        tensors[-1] = torch.rand(PARAMETERS[kind], dtype=torch.float64) * 0.3
    candidates = JaggedTensor(torch.zeros(asked), lengths=torch.tensor(counts, dtype=torch.int64))
    return [t.requires_grad_() for t in tensors], events, candidates


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1, max_size=5),
    heads=st.sampled_from([1, 2, 3]),
    mode=st.sampled_from([SCORE_BIAS, THREE_CHANNELS, TWO_CHANNELS]),
    kind=st.sampled_from([BUCKETS, POWER, DECAY]),
    spread=st.integers(0, 9),
    in_order=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_kernels_equal_plain_torch(requests, heads, mode, kind, spread, in_order, seed) -> None:  # type: ignore[no-untyped-def]
    """Promise: values and every gradient are those of plain torch, in float64, for any lengths and numbers of candidates."""
    torch.manual_seed(seed)
    lengths, counts = [n for n, _ in requests], [c for _, c in requests]
    tensors, events, candidates = drawn(lengths, counts, 4 * heads, kind, spread, in_order)
    _compare(tensors, events, candidates, Attention(heads, 0.1, mode, kind))


def _compare(tensors: list[Tensor], events: EventTimes, candidates: JaggedTensor, attention: Attention) -> None:
    found = candidate_attention(*tensors, events, candidates, attention)
    wanted = candidate_attention_reference(*tensors, events, candidates, attention)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    grad = torch.randn_like(found)
    mine = torch.autograd.grad(found, tensors, grad, allow_unused=True)
    theirs = torch.autograd.grad(wanted, tensors, grad, allow_unused=True)
    for name, one, other in zip(("q", "own_k", "own_v", "k", "v", "by_place", "by_time"), mine, theirs):
        zero = torch.zeros(())
        torch.testing.assert_close(
            zero if one is None else one,
            zero.expand(() if one is None else one.shape).to(torch.float64) if other is None else other,
            rtol=1e-8,
            atol=1e-9,
            check_dtype=False,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("mode", [SCORE_BIAS, THREE_CHANNELS])
def test_several_tiles(mode: int) -> None:
    """Promise: results do not depend on how histories and candidates fall into tiles."""
    torch.manual_seed(1)
    tensors, events, candidates = drawn([700, 256, 1], [70, 64, 3], 8, BUCKETS, 6)
    _compare(tensors, events, candidates, Attention(2, 0.01, mode))


def test_candidates_do_not_see_each_other() -> None:
    """Promise: a candidate's result is the same whoever stands beside it."""
    torch.manual_seed(2)
    tensors, events, candidates = drawn([30], [9], 8, BUCKETS, 5)
    together = candidate_attention(*tensors, events, candidates, Attention(2, 0.1))
    for i in range(9):
        one = JaggedTensor(torch.zeros(1), lengths=torch.tensor([1]))
        alone = candidate_attention(*(t[i : i + 1] for t in tensors[:3]), *tensors[3:], events, one, Attention(2, 0.1))
        torch.testing.assert_close(alone[0], together[i], rtol=1e-12, atol=1e-12)


def test_too_few_places() -> None:
    """Promise: biases that do not reach the first place are one clear line, not a read out of bounds."""
    tensors, events, candidates = drawn([5], [2], 4, BUCKETS, 5)
    with pytest.raises(ValueError, match="need 11 biases by place"):
        candidate_attention(*tensors[:5], tensors[5][1:-1], tensors[6], events, candidates, Attention(1, 0.1))
