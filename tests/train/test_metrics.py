import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nestpipe.comm.world import World
from nestpipe.train.metrics import ClickMetrics, RankMetrics, target_ranks
from workers import run

# Few distinct scores make many ties; large and infinite ones become equal in a sigmoid, and must not here.
logits = st.sampled_from([-math.inf, -60.0, -2.0, -0.0, 0.0, 0.5, 1.5, 40.0, 50.0, math.inf])
samples = st.lists(st.tuples(logits, st.integers(0, 1)), max_size=40)


def click_metrics(scores: list[float], labels: list[int], **options: bool) -> dict[str, float]:
    metrics = ClickMetrics(**options)
    half = len(scores) // 2
    metrics.update(torch.tensor(scores[:half], dtype=torch.float64), torch.tensor(labels[:half]))
    metrics.update(torch.tensor(scores[half:], dtype=torch.float64), torch.tensor(labels[half:]))
    return metrics.compute()


def pair_count_auc(scores: list[float], labels: list[int]) -> float:
    s, y = np.array(scores), np.array(labels)
    higher, lower = s[y == 1][:, None], s[y == 0][None, :]
    return float(((higher > lower) + 0.5 * (higher == lower)).mean()) if higher.size and lower.size else math.nan


@settings(deadline=None)  # the machine may be busy
@given(samples)
def test_auc_is_the_share_of_ordered_pairs(pairs: list[tuple[float, int]]) -> None:
    """Promise: AUC is exact with ties and extreme logits, and nan when all labels are alike or there are none."""
    scores, labels = [s for s, _ in pairs], [y for _, y in pairs]
    metrics = click_metrics(scores, labels)
    assert metrics["auc"] == pytest.approx(pair_count_auc(scores, labels), abs=1e-6, nan_ok=True)
    assert metrics["samples"] == len(pairs)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.tuples(st.floats(-30, 30), st.integers(0, 1)), min_size=2, max_size=30))
def test_log_loss_ne_and_calibration_are_their_definitions(pairs: list[tuple[float, int]]) -> None:
    """Promise: log loss, NE = log loss / entropy of the base rate, and calibration follow the formulas in float64."""
    z, y = np.array([s for s, _ in pairs]), np.array([y for _, y in pairs])
    metrics = click_metrics(z.tolist(), y.tolist())
    p, rate = 1 / (1 + np.exp(-z)), y.mean()
    log_loss = -np.where(y, -np.logaddexp(0, -z), -np.logaddexp(0, z)).mean()
    assert metrics["log_loss"] == pytest.approx(log_loss, rel=1e-12)
    assert metrics["calibration"] == pytest.approx(p.sum() / y.sum() if rate else math.nan, rel=1e-12, nan_ok=True)
    entropy = -(rate * np.log(rate) + (1 - rate) * np.log(1 - rate)) if 0 < rate < 1 else math.nan
    assert metrics["ne"] == pytest.approx(log_loss / entropy, rel=1e-12, nan_ok=True)


def test_logits_and_probabilities_agree() -> None:
    """Promise: the same predictions as logits and as probabilities give the same metrics."""
    z, y = torch.linspace(-4, 4, 50, dtype=torch.float64), (torch.arange(50) % 3 == 0).long()
    as_logits = click_metrics(z.tolist(), y.tolist())
    as_probabilities = click_metrics(z.sigmoid().tolist(), y.tolist(), logits=False)
    assert as_probabilities == pytest.approx(as_logits, rel=1e-9)


def test_click_metrics_on_strange_input() -> None:
    """Promise: no samples and nan scores give nan, not luck or a crash; wrong labels, shapes and ranges are refused."""
    empty = ClickMetrics().compute()
    assert empty["samples"] == 0 and all(math.isnan(v) for k, v in empty.items() if k != "samples")
    assert math.isnan(click_metrics([0.5, math.nan], [0, 1])["auc"])
    assert click_metrics([math.inf, -math.inf], [1, 0])["log_loss"] == 0
    for options, scores, labels in [
        ({}, torch.zeros(2), torch.zeros(2, 1)),
        ({}, torch.zeros(2), torch.tensor([0, 2])),
        ({"logits": False}, torch.tensor([1.5]), torch.tensor([1])),
    ]:
        with pytest.raises(ValueError, match=r"shape|0 or 1|from 0 to 1"):
            ClickMetrics(**options).update(scores, labels)


def test_kept_scores_are_copies() -> None:
    """Promise: a caller may reuse its score and label tensors after update."""
    metrics, scores, labels = ClickMetrics(), torch.tensor([1.0, 2.0]).double(), torch.tensor([0.0, 1.0]).double()
    metrics.update(scores, labels)
    scores.zero_(), labels.zero_()
    assert metrics.compute()["auc"] == 1


def test_rank_metrics_by_hand() -> None:
    """Promise: HR, NDCG and MRR of one target per sample are their definitions, and nan without samples."""
    metrics = RankMetrics([1, 3])
    metrics.update(torch.tensor([0, 2]))
    metrics.update(torch.tensor([3, 9]))
    assert metrics.compute() == pytest.approx(
        {
            "hr@1": 0.25,
            "ndcg@1": 0.25,
            "hr@3": 0.5,
            "ndcg@3": 1.5 / 4,
            "mrr": (1 + 1 / 3 + 1 / 4 + 1 / 10) / 4,
            "samples": 4,
        }
    )
    assert math.isnan(RankMetrics([5]).compute()["mrr"])


@st.composite
def rankings(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[list[int]]]:
    rows, catalogue = draw(st.integers(0, 4)), draw(st.integers(1, 6))
    values = st.sampled_from([0.0, 1.0, 2.0, math.nan, -math.inf])
    scores = draw(st.lists(st.lists(values, min_size=catalogue, max_size=catalogue), min_size=rows, max_size=rows))
    items = st.integers(0, catalogue - 1)
    targets = draw(st.lists(items, min_size=rows, max_size=rows))
    seen = draw(st.lists(st.lists(items, max_size=8), min_size=rows, max_size=rows))
    return torch.tensor(scores).reshape(rows, catalogue), torch.tensor(targets, dtype=torch.long), seen


@settings(deadline=None)  # the machine may be busy
@given(rankings())
def test_target_ranks_by_counting(case: tuple[Tensor, Tensor, list[list[int]]]) -> None:
    """Promise: the rank counts each unseen item that is not strictly worse, once, and never the target itself."""
    scores, targets, seen = case
    expected = [
        sum(not s < row[t] for item, s in enumerate(row) if item != t and item not in gone)
        for row, t, gone in zip(scores.tolist(), targets.tolist(), seen)
    ]
    offsets = torch.tensor([0] + [len(s) for s in seen]).cumsum(0)
    index = torch.tensor([item for s in seen for item in s], dtype=torch.long)
    assert target_ranks(scores, targets, (index, offsets)).tolist() == expected
    if not any(seen):
        assert target_ranks(scores, targets).tolist() == expected


def test_equal_scores_are_no_hit() -> None:
    """Promise: a model that scores all items alike, or gives nan, ranks its target last; a bad index is refused."""
    assert target_ranks(torch.zeros(2, 5), torch.tensor([0, 4])).tolist() == [4, 4]
    assert target_ranks(torch.full((1, 5), math.nan), torch.tensor([0])).tolist() == [4]
    with pytest.raises(ValueError, match="0 to 4"):
        target_ranks(torch.zeros(1, 5), torch.tensor([-1]))


def worker(world: World, cuts: list[int]) -> list[list[dict[str, float]]]:
    scores, labels, ranks = data()
    results = []
    for cut in cuts:
        mine = slice(0, cut) if world.rank == 0 else slice(cut, None)
        clicks, places = ClickMetrics(), RankMetrics([1, 10])
        if len(scores[mine]):  # a worker without samples never sees a batch
            clicks.update(scores[mine], labels[mine])
            places.update(ranks[mine])
        results.append([clicks.compute(), places.compute()])
    results.append([ClickMetrics().compute(), RankMetrics([1]).compute()])
    return results


def data() -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    scores = torch.randn(101, generator=random).round(decimals=1)
    labels = (torch.rand(101, generator=random) < scores.sigmoid()).float()
    return scores, labels, torch.randint(0, 20, (101,), generator=random)


def test_two_workers_give_what_one_gives() -> None:
    """Promise: metrics over workers are those of the union, on every worker, for uneven, empty and one-class shares."""
    scores, labels, ranks = data()
    clicks, places = ClickMetrics(), RankMetrics([1, 10])
    clicks.update(scores, labels)
    places.update(ranks)
    results = run(2, worker, [0, 1, 40, 101])
    for result in results:
        *shared, (no_clicks, no_places) = result
        for got_clicks, got_places in shared:
            assert got_clicks == pytest.approx(clicks.compute(), rel=1e-12)
            assert got_places == pytest.approx(places.compute(), rel=1e-12)
        assert no_clicks["samples"] == no_places["samples"] == 0 and math.isnan(no_clicks["auc"])
    assert json.dumps(results[0]) == json.dumps(results[1])
