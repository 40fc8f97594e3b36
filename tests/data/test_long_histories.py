"""Long histories that are drawn when they are read, and the best hit rate on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.data.best_hits import best_hits, chance_of_rank, next_interests
from nestpipe.data.global_batches import GlobalBatches
from nestpipe.data.long_histories import LongHistoriesData, LongHistorySource
from nestpipe.data.long_histories_kernels import draw_events, follower, group_size, group_spans, item_ids
from nestpipe.data.shuffled_numbers import shuffled_numbers
from nestpipe.train.metrics import RankMetrics, target_ranks

SMALL = LongHistoriesData(
    users=300, items=120, groups=5, median_length=30.0, session=7, max_length=12, negatives=3, eval_users=300
)
SETTINGS = st.builds(
    LongHistoriesData,
    users=st.integers(1, 40),
    items=st.integers(6, 60),
    groups=st.integers(1, 6),
    median_length=st.floats(3, 60),
    sigma=st.floats(0, 2),
    zipf=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    order=st.sampled_from([0.0, 0.5, 0.9]),
    session=st.integers(1, 20),
    drift=st.sampled_from([0.0, 0.5, 1.0]),
    max_length=st.integers(1, 30),
    negatives=st.integers(0, 3),
    eval_users=st.integers(0, 50),
)


def samples(source: LongHistorySource, epoch: int = 0) -> dict[int, dict[str, list[int]]]:
    """Features by user."""
    found: dict[int, dict[str, list[int]]] = {}
    for chunk, _ in source.read(0, source.extent, epoch):
        parts = {name: jagged.to_dense() for name, jagged in chunk.sparse_features.to_dict().items()}
        for b, user in enumerate(chunk.extras["user"].tolist()):
            assert user not in found
            found[user] = {name: values[b].tolist() for name, values in parts.items()}
    return found


def history(source: LongHistorySource, user: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Item numbers and times, from the first event on."""
    items, times = np.empty(stop, np.int64), np.empty(stop, np.int64)
    draw_events(user, 0, stop, group_spans(source.world), source.world, items, times)
    return items, times


@given(SETTINGS, st.integers(0, 3))
@settings(max_examples=60)
def test_batches_are_the_end_of_whole_histories(data: LongHistoriesData, seed: int) -> None:
    """Train holds all but the last item, eval predicts it; drawing from the middle gives what drawing all gives."""
    train, held_out = data.open("train", seed), data.open("eval", seed)
    ids = item_ids(train.world)
    trained, predicted = samples(train), samples(held_out)
    assert sorted(trained) == list(range(data.users))
    assert sorted(predicted) == list(range(min(data.users, data.eval_users)))
    lengths = dict(zip(trained, train.lengths(np.arange(train.extent), 0).tolist()))
    for user, sample in trained.items():
        n = len(sample["history"])
        assert n == lengths[user] == len(sample["target"]) == len(sample["time"]) - 1 <= data.max_length
        assert sample["history"][1:] == sample["target"][:-1] and (np.diff(sample["time"]) > 0).all()
        assert len(sample["negatives"]) == n * data.negatives and set(sample["negatives"]) <= set(ids.tolist())
    for user, sample in predicted.items():
        stop = 1 + int(held_out.lengths(np.array([user]), 0)[0])
        if stop <= data.max_length:  # the whole history is shown
            items, times = history(held_out, user, stop)
            assert sample["history"] + sample["target"] == ids[items].tolist() and sample["time"] == times.tolist()
        keep = min(len(trained[user]["target"]), len(sample["history"]))
        assert sample["history"][-keep:] == trained[user]["target"][-keep:]
        assert sample["negatives"] == [] and len(sample["target"]) == 1


@given(SETTINGS, st.integers(1, 9))
@settings(max_examples=30)
def test_samples_do_not_depend_on_how_they_are_read(data: LongHistoriesData, cut: int) -> None:
    """Any units in any order, from any source: the same samples; epochs differ in order and negatives."""
    source = data.open("train", 1)
    units = np.arange(source.extent)[::-1][::cut]
    taken = source.take(units, 2)
    again = samples(data.open("train", 1), 2)
    assert taken.loss_terms is not None
    for b, user in enumerate(taken.extras["user"].tolist()):
        for name in source.features:
            assert taken.sparse_features[name].to_dense()[b].tolist() == again[user][name]
    assert taken.loss_terms.tolist() == taken.sparse_features["target"].lengths().tolist()
    assert len(source.take(np.empty(0, np.int64), 0)) == 0


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
@settings(max_examples=50)
def test_shuffled_numbers_are_a_permutation(count: int, key: int) -> None:
    """Every number comes once."""
    found = shuffled_numbers(np.arange(count), count, np.uint64(key))
    assert sorted(found.tolist()) == list(range(count))


def test_orders_differ_and_huge_counts_need_no_memory() -> None:
    """Places of a long order are far apart; two keys have two orders; all orders of three numbers occur."""
    far = shuffled_numbers(np.arange(1000), 2**40, np.uint64(1))
    assert len(set(far.tolist())) == 1000 and abs(far.mean() / 2**40 - 0.5) < 0.05
    assert (
        shuffled_numbers(np.arange(1000), 1000, np.uint64(1)) != shuffled_numbers(np.arange(1000), 1000, np.uint64(2))
    ).mean() > 0.9
    orders = {tuple(shuffled_numbers(np.arange(3), 3, np.uint64(key)).tolist()) for key in range(100)}
    assert len(orders) == 6


def test_lengths_are_those_of_kuairand() -> None:
    """Promise: with the defaults, the median and the 90th percentile of KuaiRand-27K."""
    told = LongHistoriesData(users=50_000, items=1000, groups=10, eval_users=0).open("train", 0).statistics["lengths"]
    assert abs(told["median"] / 8594 - 1) < 0.03 and abs(told["p90"] / 24_587 - 1) < 0.05


def test_items_follow_a_power_law_and_interests_drift() -> None:
    """The most popular item of a group has the share that the law gives it; sessions keep their group, later ones leave it."""
    data = replace(SMALL, users=2000, order=0.0, median_length=70.0, sigma=0.0, drift=1.0)
    source = data.open("train", 0)
    items = np.stack([history(source, user, 70)[0] for user in range(2000)])
    groups = items % 5
    assert (groups.reshape(2000, 10, 7) == groups.reshape(2000, 10, 7)[:, :, :1]).all()
    moved = (groups[:, 7::7] - groups[:, :-7:7]) % 5
    assert set(np.unique(moved).tolist()) == {1, 4}
    spans = group_spans(source.world)
    law = [chance_of_rank(rank, 0, spans, source.world) for rank in range(group_size(0, source.world))]
    assert abs(sum(law) - 1) < 1e-9
    share = np.bincount(items[:, ::7].ravel() // 5, minlength=24) / items[:, ::7].size
    np.testing.assert_allclose(share, law, atol=0.01)


def chances(source: LongHistorySource, user: int, at: int, before: int) -> np.ndarray:
    """Of every item to be event `at` of a user, item by item in plain Python."""
    world, spans = source.world, group_spans(source.world)
    found = np.zeros(world.items)
    groups, shares, follows = next_interests(user, at, world)
    for group, share in zip(groups.tolist(), shares.tolist()):
        for rank in range(group_size(group, world)):
            found[rank * world.groups + group] += share * chance_of_rank(rank, group, spans, world)
    found[follower(before, spans, world)] += follows
    return found


@given(SETTINGS, st.integers(0, 3))
@settings(max_examples=40)
def test_best_hit_rate_is_that_of_the_best_ranking(data: LongHistoriesData, seed: int) -> None:
    """Against a plain sum: the chances of what was shown, and of the k likeliest of the rest; all chances sum to 1."""
    source = data.open("eval", seed)
    top = np.array([1, 3, 10])
    users = np.arange(min(5, data.users))
    found = best_hits(users, data.max_length, top, source.world)
    eval_source = replace(data, eval_users=data.users).open("eval", seed)
    lengths = eval_source.lengths(users, 0)
    whole = replace(data, max_length=10_000_000, eval_users=data.users).open("eval", seed).lengths(users, 0)
    for user in users.tolist():
        last = int(whole[user])
        items, _ = history(source, user, last)
        p = chances(source, user, last, int(items[-1]))
        assert abs(p.sum() - 1) < 1e-9
        shown = np.unique(items[last - int(lengths[user]) :])
        rest = np.sort(np.delete(p, shown))[::-1]
        np.testing.assert_allclose(found[user], [p[shown].sum() + rest[:k].sum() for k in top], atol=1e-9)


@pytest.mark.parametrize("changes", [{}, {"order": 0.9, "drift": 0.0}, {"session": 1, "zipf": 0.5}])
def test_an_oracle_reaches_the_best_hit_rate(changes: dict[str, Any]) -> None:
    """Promise: what knows the true chances hits as often as is told, to sampling error; without the signal it does not."""
    data = replace(SMALL, users=4000, eval_users=4000, **changes)
    source = data.open("eval", 5)
    ids = item_ids(source.world)
    number = {int(one): place for place, one in enumerate(ids)}
    whole = replace(data, max_length=10_000_000).open("eval", 5).lengths(np.arange(4000), 0)
    metrics, blind = RankMetrics([10]), RankMetrics([10])
    for user, sample in samples(source).items():
        shown = torch.tensor([number[one] for one in sample["history"]])
        target = torch.tensor([number[sample["target"][0]]])
        scores = torch.from_numpy(chances(source, user, int(whole[user]), int(shown[-1])))
        scores[shown] += 1.0  # they do not compete with others
        exclude = (shown, torch.tensor([0, len(shown)]))
        metrics.update(target_ranks(scores[None], target, exclude))
        blind.update(target_ranks(torch.arange(data.items, 0.0, -1.0)[None], target, exclude))
    best = best_hits(np.arange(4000), data.max_length, np.array([10]), source.world).mean()
    hit_rate = metrics.compute()["hr@10"]
    assert abs(hit_rate - best) < 4 * np.sqrt(best * (1 - best) / 4000)
    assert blind.compute()["hr@10"] < best - 0.1
    told = source.statistics
    assert told["best"]["users"] == 1000 and abs(told["best"]["hr@10"] - best) < 0.03
    assert f"best possible HR@10 {told['best']['hr@10']:.4f}" in told["notes"][0]


def test_any_number_of_users_and_items() -> None:
    """2^40 of both: nothing of that size is made; ids are all different."""
    data = LongHistoriesData(users=2**40, items=2**40, groups=1000, median_length=50.0, eval_users=0, negatives=4)
    source = data.open("train", 0)
    chunk, ends = next(iter(source.read(2**39, 2**39 + 4, 0)))
    assert len(chunk) == 4 and ends.tolist() == [2**39 + 1 + i for i in range(4)]
    assert (
        len(set(chunk.sparse_features["negatives"].values().tolist()))
        == chunk.sparse_features["negatives"].values().numel()
    )
    assert data.open("eval", 0).extent == 0 and source.statistics["lengths"]["users"] == 100_000
    assert len(source.catalogue) == 0 and source.mean_length > 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"items": 2**23}, r"data\.items \(8,388,608\) are too many for that: set data\.eval_users = 0"),
        ({"groups": 121}, r"data\.groups must be at most data\.items \(120\), not 121"),
        ({"users": 2**41}, r"data\.users must be at most"),
        ({"median_length": 2.0}, r"data\.median_length must be at least 3"),
        ({"drift": 1.5}, r"data\.drift must be at most 1"),
        ({"order": 1.0}, r"data\.order must be less than 1"),
        ({"session": 0}, r"data\.session must be at least 1"),
        ({"sigma": float("nan")}, r"data\.sigma must be a finite number"),
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    """One line that says what to change."""
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


def test_pool() -> None:
    """Promise: a pool has items of the catalogue, others for every batch and seed; targets have no negatives of their own."""
    data = LongHistoriesData(users=20, items=50, groups=5, median_length=9.0, negatives=7, negatives_from="pool")
    source, batches = data.open("train", 3), GlobalBatches(20, 8, 1, 4, 1)
    assert source.pool is not None and data.open("eval", 3).pool is None
    pools = [source.pool.ids(number, batches).tolist() for number in range(3)]
    assert all(len(pool) == 7 and set(pool) <= set(source.catalogue.tolist()) for pool in pools)
    assert pools[0] != pools[1] and pools[0] != data.open("train", 4).pool.ids(0, batches).tolist()
    assert source.take(np.arange(4), 0).sparse_features["negatives"].values().numel() == 0
