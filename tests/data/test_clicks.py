"""Synthetic clicks: pure, skewed as asked, and with a signal whose limit is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nestpipe.data.clicks import ClicksData, expected_auc
from nestpipe.data.stream import Stream
from tiny import samples_of


def all_of(data: ClicksData, split: str = "train", seed: int = 0) -> Any:
    (batch,) = Stream(data.open(split, seed), 10**9)
    return batch


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    order = np.argsort(scores, kind="stable")
    rank = np.empty(len(scores))
    rank[order] = np.arange(1, len(scores) + 1)
    clicks = labels.sum()
    return float((rank[labels > 0].sum() - clicks * (clicks + 1) / 2) / (clicks * (len(labels) - clicks)))


def test_a_sample_depends_on_its_number_alone() -> None:
    """Sample i is the same read alone, in a chunk, and in a longer data set."""
    data = ClicksData(features=3, hot=[1, 4, 2], samples=5000)
    source = data.open("train", 9)
    whole = samples_of(all_of(data, seed=9))
    for i in [0, 1, 2047, 2048, 4999]:
        ((alone, ends),) = source.read(i, i + 1, 0)
        assert samples_of(alone) == [whole[i]] and ends.tolist() == [i + 1]
    longer = ClicksData(features=3, hot=[1, 4, 2], samples=6000)
    assert samples_of(all_of(longer, seed=9))[:5000] == whole


def test_seed_and_split_change_the_samples() -> None:
    """Another seed is another world; eval is another draw from the same world."""
    data = ClicksData(features=2, ids=20, samples=500, eval_samples=500)
    train, held_out, other = all_of(data), all_of(data, "eval"), all_of(data, seed=1)
    assert not set(samples_of(train)) & set(samples_of(held_out))
    ids = [set(batch.sparse_features.values().tolist()) for batch in (train, held_out, other)]
    assert len(ids[0] & ids[1]) > 30 and not ids[0] & ids[2]


def test_bags_have_the_lengths_asked_for() -> None:
    """One-hot features always have one id; bags have 0 to 2*hot with the mean asked for, some of them none."""
    sparse = all_of(ClicksData(features=2, hot=[1, 3], samples=4000)).sparse_features
    assert sparse["f0"].lengths().unique().tolist() == [1]
    lengths = sparse["f1"].lengths()
    assert lengths.unique().tolist() == list(range(7)) and abs(float(lengths.float().mean()) - 3) < 0.15


@pytest.mark.parametrize("zipf", [0.0, 0.7, 1.0, 1.3])
def test_ids_follow_the_power_law(zipf: float) -> None:
    """The share of the most frequent id and of the upper half is what the exponent says."""
    data = ClicksData(features=1, ids=100, zipf=zipf, samples=40_000, dense=0)
    _, counts = np.unique(all_of(data).sparse_features.values().numpy(), return_counts=True)
    share = np.sort(counts)[::-1] / 40_000
    edges = np.log(np.arange(1.0, 102)) if zipf == 1 else np.arange(1.0, 102) ** (1 - zipf)
    expected = np.diff(edges) / (edges[-1] - edges[0])
    assert len(share) == 100
    assert share[0] == pytest.approx(expected[0], rel=0.25) and share[:50].sum() == pytest.approx(
        expected[:50].sum(), abs=0.03
    )


def test_very_many_ids_need_no_table() -> None:
    """A trillion ids are drawn as readily as ten, all different where they hardly ever meet."""
    batch = all_of(ClicksData(features=1, ids=2**40, zipf=0.0, samples=3000))
    assert batch.sparse_features.values().unique().numel() == 3000


def test_bayes_auc_is_what_the_truth_scores() -> None:
    """The expected AUC agrees with the AUC of the true probabilities on the labels that were drawn."""
    data = ClicksData(eval_samples=50_000)
    batch, source = all_of(data, "eval"), data.open("eval", 0)
    truth, labels = batch.extras["truth"].numpy(), batch.labels.numpy()
    assert source.bayes_auc() == pytest.approx(auc(truth, labels), abs=0.006)
    assert 0.75 < source.bayes_auc() < 0.87
    assert labels.mean() == pytest.approx(truth.mean(), abs=0.01)
    assert source.bayes_auc(1000) == pytest.approx(expected_auc(truth[:1000]))


def test_expected_auc_by_counting_pairs() -> None:
    """Against every pair counted by hand, ties and extremes included."""
    rng = np.random.default_rng(0)
    truth = np.round(rng.random(40), 1)
    right = pairs = 0.0
    for i in range(40):
        for j in range(40):
            if i != j:
                weight = truth[i] * (1 - truth[j])
                pairs += weight
                right += weight * (1.0 if truth[i] > truth[j] else 0.5 if truth[i] == truth[j] else 0.0)
    assert expected_auc(truth) == pytest.approx(right / pairs)
    assert expected_auc(np.full(9, 0.3)) == pytest.approx(0.5)
    assert np.isnan(expected_auc(np.ones(5)))


def test_no_signal_leaves_nothing_to_learn() -> None:
    """signal = 0 gives every sample the same probability."""
    assert ClicksData(signal=0.0, eval_samples=500).open("eval", 0).bayes_auc() == pytest.approx(0.5)


def test_the_signal_can_be_learned() -> None:
    """A plain logistic regression on 20,000 samples comes most of the way to the Bayes AUC (and not beyond)."""
    data = ClicksData(features=4, ids=100, products=1, samples=20_000, eval_samples=10_000)
    train, held_out = all_of(data), all_of(data, "eval")
    keys, rows = train.sparse_features.values().unique(return_inverse=True)
    weight = torch.zeros(keys.numel(), requires_grad=True)
    slope = torch.zeros(4, requires_grad=True)

    def logits(batch: Any, rows: torch.Tensor) -> torch.Tensor:
        return weight[rows].view(4, -1).sum(0) + batch.dense @ slope

    squares = [torch.zeros_like(weight), torch.zeros_like(slope)]
    for _ in range(20):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits(train, rows), train.labels)
        with torch.no_grad():  # Adagrad; torch.optim takes seconds to import
            for p, square, gradient in zip((weight, slope), squares, torch.autograd.grad(loss, (weight, slope))):
                p -= 0.3 * gradient / (square.addcmul_(gradient, gradient).sqrt() + 1e-8)
    bayes = data.open("eval", 0).bayes_auc()
    unseen = torch.searchsorted(keys, held_out.sparse_features.values()).clamp(max=keys.numel() - 1)
    reached = auc(logits(held_out, unseen).detach().numpy(), held_out.labels.numpy())
    assert 0.85 < (reached - 0.5) / (bayes - 0.5) < 1.01


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ids": 0}, "data.ids must be at least 1, not 0"),
        ({"features": 2, "ids": [5, 0]}, r"data.ids\[1\] must be at least 1, not 0"),
        ({"features": 3, "hot": [1, 2]}, "data.hot must have 3 entries, one for each feature, not 2"),
        ({"features": 2.5}, "data.features must be a whole number, not 2.5"),
        ({"zipf": "steep"}, "data.zipf must be a finite number, not 'steep'"),
        ({"signal": -1}, "data.signal must be at least 0, not -1"),
        ({"samples": True}, "data.samples must be a whole number, not True"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], message: str) -> None:
    """A wrong value is refused when the section is made, and the message names the field."""
    with pytest.raises(ValueError, match=message):
        ClicksData(**fields)


def test_unknown_split() -> None:
    """Only train and eval exist."""
    with pytest.raises(ValueError, match="split must be 'train' or 'eval', not 'test'"):
        ClicksData().open("test", 0)
