"""Who gets which sample: a partition, as even as moves and swaps can make it, the same on every machine, in time."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestpipe.data.balance import assign as module
from nestpipe.data.balance.assign import CLOSE, assign, waiting, whole

COSTS = st.lists(st.floats(0, 1e6), max_size=40)


def loads_of(costs: np.ndarray, chosen: np.ndarray, parts: int) -> np.ndarray:
    return np.bincount(chosen, weights=costs, minlength=parts)


@given(COSTS, st.integers(1, 9))
def test_no_move_and_no_swap_would_help(costs: list[float], parts: int) -> None:
    """Every sample is in one part, and the most expensive part can be relieved by none of the steps that are tried."""
    units = whole(np.array(costs)).astype(np.int64)
    chosen = assign(np.array(costs), parts)
    assert len(chosen) == len(costs) and ((chosen >= 0) & (chosen < parts)).all()
    if not costs:
        return
    loads = np.array([units[chosen == p].sum() for p in range(parts)])
    high, mean = int(loads.argmax()), int(units.sum()) // parts
    if loads[high] - mean <= mean // CLOSE:
        return
    for i in np.flatnonzero(chosen == high):
        for p in range(parts):
            if p != high:
                assert max(loads[high] - units[i], loads[p] + units[i]) >= loads[high]
        for j in np.flatnonzero(chosen != high):
            less = units[i] - units[j]
            assert max(loads[high] - less, loads[chosen[j]] + less) >= loads[high]


@given(st.lists(st.floats(0.01, 1e3), min_size=1, max_size=30), st.integers(1, 5), st.sampled_from([1e-30, 1.0, 1e30]))
def test_the_unit_of_costs_does_not_matter(costs: list[float], parts: int, unit: float) -> None:
    """Seconds, FLOPs or tokens: only ratios count."""
    exact = np.ldexp(np.array(costs), 0)
    scaled = exact * 2.0 ** round(math.log2(unit))
    assert (assign(exact, parts) == assign(scaled, parts)).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, 0.0])
def test_costs_that_are_none_count_as_nothing(bad: float) -> None:
    """One bad number spoils no plan; if all are bad, counts are even."""
    some = np.array([3.0, bad, 1.0, bad, 2.0])
    good = np.array([3.0, 0.0, 1.0, 0.0, 2.0])
    assert (assign(some, 2) == assign(good, 2)).all()
    assert np.bincount(assign(np.full(7, bad), 3)).tolist() == [3, 2, 2]


def test_more_parts_than_samples() -> None:
    """Some parts are empty then, and no sample is lost."""
    assert sorted(assign(np.array([5.0, 1.0]), 4).tolist()) == [0, 1]
    assert assign(np.empty(0), 4).tolist() == []


def test_waiting_is_a_share_of_the_longest() -> None:
    assert waiting(np.array([1.0, 3.0])) == pytest.approx(1 / 3)
    assert waiting(np.zeros(4)) == 0
    assert waiting(np.array([[2.0, 2.0], [0.0, 4.0]])).tolist() == [0, 0.5]


def long_histories(rng: np.random.Generator, count: int) -> np.ndarray:
    """Lengths as in KuaiRand-27K: log-normal, a share of each user's events kept, cut at 8,192."""
    raw = np.clip(np.exp(rng.normal(math.log(8594), 0.82, count)), 100, 228_000)
    kept = np.clip(rng.beta(4, 6.53, count), 0.02, 0.95) * 0.75
    return np.clip(raw * kept, 5, 8192).astype(np.int64)


@pytest.mark.parametrize(("workers", "most"), [(16, 0.003), (128, 0.003)])
def test_long_histories_wait_little_and_plan_fast(workers: int, most: float) -> None:
    """8 users a worker: at most 0.3 % of the step is planned to be lost, and a plan takes at most 2 ms."""
    rng, lost, seconds = np.random.default_rng(7), [], []
    for _ in range(40):
        n = long_histories(rng, 8 * workers).astype(np.float64)
        costs = n + n * n / 1000
        begin = time.thread_time()
        chosen = assign(costs, workers)
        seconds.append(time.thread_time() - begin)
        lost.append(float(waiting(loads_of(costs, chosen, workers))))
    assert np.mean(lost) <= most
    assert np.median(seconds) <= 2e-3


def test_very_large_batches_are_bounded() -> None:
    """Tries run out instead of time."""
    costs = np.random.default_rng(1).lognormal(0, 3, 20_000)
    assign(costs, 2)
    begin = time.thread_time()
    chosen = module._assign(whole(costs), 300, 1 << 60, module.MOST_TRIES)
    assert len(np.unique(chosen)) == 300 and time.thread_time() - begin < 1.0
