"""Shared negatives, a pool of them, and the correction by log q: beside sums written out position by position."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from comparing import FLOATS, check_close
from nestpipe.data.jagged import JaggedTensor
from nestpipe.ops.sampled_softmax import pooled_softmax_loss, sampled_softmax_loss
from nestpipe.ops.sharing import share

TEMPERATURE = 0.2
LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def unit(vector: Tensor) -> Tensor:
    return vector / vector.norm().clamp_min(1e-6)


def logit(query: Tensor, rows: Tensor, item: int, log_q: Tensor | None) -> Tensor:
    found = unit(query) @ unit(rows[item]) / TEMPERATURE
    return found if log_q is None else found - log_q[item]


def partners(lengths: list[int], factor: int) -> list[list[int]]:
    """The other positions that each position shares with."""
    found, start = [], 0
    for n in lengths:
        apart = [max(turn, turn * n // factor) for turn in range(1, min(factor, n))]
        found += [[start + (i + d) % n for d in apart] for i in range(n)]
        start += n
    return found


def by_hand(
    kind: str, others: list[list[int]], queries: Tensor, rows: Tensor, target: list[int], negatives: list[list[int]],
    log_q: Tensor | None,
) -> Tensor:  # fmt: skip
    total = queries.new_zeros(())
    for i, positive in enumerate(target):
        terms = [logit(queries[i], rows, item, log_q) for item in negatives[i] if item != positive]
        for other in others[i]:
            for item in negatives[other]:
                if kind == "negatives" and item != positive:
                    terms.append(logit(queries[i], rows, item, log_q))
                if kind == "logits" and item not in (positive, target[other]):
                    terms.append(logit(queries[other], rows, item, log_q))
        own = logit(queries[i], rows, positive, log_q)
        total = total + torch.logsumexp(torch.stack([own, *terms]), 0) - own
    return total / len(target)


def drawn(lengths: list[int], each: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    positions = sum(lengths)
    queries, rows = torch.randn(positions, 5, dtype=dtype), torch.randn(6, 5, dtype=dtype)
    target = torch.randint(0, 6, (positions,), dtype=torch.int32)
    negatives = torch.randint(0, 6, (positions, each), dtype=torch.int32)
    return queries.requires_grad_(), rows.requires_grad_(), target, negatives


def with_grads(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [loss, *torch.autograd.grad(loss, inputs)]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["logits", "negatives"]), LENGTHS, st.integers(2, 5), st.integers(1, 4), st.booleans(), FLOATS,
       st.integers(0, 2**31 - 1))  # fmt: skip
@example("logits", [1, 1], 2, 2, False, torch.float64, 0)
@example("negatives", [2, 9, 1], 4, 3, True, torch.float64, 0)
def test_sharing_by_hand(
    kind: str, lengths: list[int], factor: int, each: int, corrected: bool, dtype: torch.dtype, seed: int
) -> None:
    """Promise: loss and gradients of both kinds of sharing are those of the sums written out."""
    queries, rows, target, negatives = drawn(lengths, each, dtype, seed)
    log_q = torch.rand(6, dtype=dtype).log() if corrected else None
    histories = JaggedTensor(torch.empty(sum(lengths)), lengths=torch.tensor(lengths))
    sharing = share(kind, factor, histories)
    found = sampled_softmax_loss(queries, rows, target, negatives, TEMPERATURE, sharing, log_q)
    wanted = by_hand(
        kind, partners(lengths, factor), queries, rows, target.tolist(), negatives.tolist(), log_q
    )  # fmt: skip
    check_close(with_grads(found, queries, rows), with_grads(wanted, queries, rows))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 9), st.integers(1, 7), st.booleans(), FLOATS, st.integers(0, 2**31 - 1))
@example(1, 1, True, torch.float64, 0)
def test_pool_by_hand(positions: int, size: int, corrected: bool, dtype: torch.dtype, seed: int) -> None:
    """Promise: a pool is the same as giving every position the same negatives."""
    queries, rows, target, _ = drawn([positions], 1, dtype, seed)
    pool = torch.randint(0, 6, (size,), dtype=torch.int32)
    log_q = torch.rand(6, dtype=dtype).log() if corrected else None
    found = pooled_softmax_loss(queries, rows, target, pool, TEMPERATURE, log_q)
    alone = [[]] * positions
    wanted = by_hand("none", alone, queries, rows, target.tolist(), [pool.tolist()] * positions, log_q)
    each = sampled_softmax_loss(
        queries, rows, target, pool.expand(positions, -1).contiguous(), TEMPERATURE, None, log_q
    )
    check_close(*(with_grads(loss, queries, rows) for loss in (found, wanted, each)))


@settings(deadline=None)
@given(LENGTHS, st.integers(2, 6))
def test_everybody_shares_and_is_shared_once(lengths: list[int], factor: int) -> None:
    """Promise: others are of the same history, never oneself, all different, and taken as often as they take."""
    sharing = share("logits", factor, JaggedTensor(torch.empty(sum(lengths)), lengths=torch.tensor(lengths)))
    history = [b for b, n in enumerate(lengths) for _ in range(n)]
    for turn, counts in zip(sharing.others.tolist(), sharing.counts.tolist()):
        assert sorted(turn) == list(range(len(history)))
        assert all(history[i] == history[other] for i, other in enumerate(turn))
        assert all(i != other for i, (other, real) in enumerate(zip(turn, counts)) if real)
    for i, b in enumerate(history):
        others = [turn[i] for turn, counts in zip(sharing.others.tolist(), sharing.counts.tolist()) if counts[i]]
        assert len(set(others)) == len(others) == min(factor, lengths[b]) - 1


def test_a_lone_position_has_its_own_negatives() -> None:
    """Promise: without another position in the history, sharing changes nothing."""
    queries, rows, target, negatives = drawn([1, 1], 3, torch.float64, 0)
    plain = sampled_softmax_loss(queries, rows, target, negatives, TEMPERATURE)
    for kind in ("logits", "negatives"):
        sharing = share(kind, 3, JaggedTensor(torch.empty(2), lengths=torch.tensor([1, 1])))
        shared = sampled_softmax_loss(queries, rows, target, negatives, TEMPERATURE, sharing)
        assert math.isclose(float(shared.detach()), float(plain.detach()), rel_tol=1e-12)


@pytest.mark.parametrize(("kind", "factor"), [("logits", 1), ("none", 2)])
def test_bad_sharing_is_refused(kind: str, factor: int) -> None:
    with pytest.raises(ValueError, match="by a factor of at least 2"):
        share(kind, factor, JaggedTensor(torch.empty(1), lengths=torch.tensor([1])))
