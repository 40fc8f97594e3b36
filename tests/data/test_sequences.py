"""Sequence batches, and the synthetic histories: against a plain version, sample by sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nestpipe.data.sequence_batches import Histories, SequenceSource
from nestpipe.data.sequences import SequencesData
from nestpipe.data.stream import Stream
from tiny import samples_of

LENGTHS = [0, 1, 2, 3, 4, 9, 30, 3]


def source(split: str, max_length: int = 10, negatives: int = 4, seed: int = 1) -> SequenceSource:
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    items = 100 + np.arange(offsets[-1])
    histories = Histories(np.arange(len(LENGTHS)) * 11, offsets, items, 1000 + items)
    return SequenceSource(histories, np.arange(100, 200), split, seed, max_length, negatives)


def by_user(one: SequenceSource, epoch: int = 0) -> dict[int, dict[str, list[int]]]:
    found = {}
    for chunk, _ in one.read(0, one.extent, epoch):
        parts = {name: jagged.to_dense() for name, jagged in chunk.sparse_features.to_dict().items()}
        for b, user in enumerate(chunk.extras["user"].tolist()):
            found[user] = {name: values[b].tolist() for name, values in parts.items()}
    return found


@pytest.mark.parametrize("max_length", [1, 2, 10, 100])
def test_leave_last_out(max_length: int) -> None:
    """Train holds all but the last item, eval predicts it; users with fewer than three items are in neither."""
    train, held_out = by_user(source("train", max_length)), by_user(source("eval", max_length))
    users = [u for u, length in enumerate(LENGTHS) if length >= 3]
    assert sorted(train) == sorted(held_out) == [11 * u for u in users]
    for u in users:
        start = sum(LENGTHS[:u])
        items = list(range(100 + start, 100 + start + LENGTHS[u]))
        sample = train[11 * u]
        assert sample["history"] == items[:-2][-max_length:]
        assert sample["target"] == items[1:-1][-max_length:]
        assert sample["time"] == [1000 + i for i in items[:-1][-max_length - 1 :]]
        assert len(sample["negatives"]) == 4 * len(sample["target"])
        sample = held_out[11 * u]
        assert sample["history"] == items[:-1][-max_length:]
        assert sample["target"] == items[-1:] and sample["negatives"] == []
        assert sample["time"] == [1000 + i for i in items[-max_length - 1 :]]


def test_loss_terms_are_predicted_positions() -> None:
    """A sample weighs in the mean loss as many times as it has targets."""
    for split in ["train", "eval"]:
        for chunk, _ in source(split).read(0, source(split).extent, 0):
            assert chunk.loss_terms is not None
            assert chunk.loss_terms.tolist() == chunk.sparse_features["target"].lengths().tolist()


def test_order_and_negatives_change_with_the_epoch_and_the_seed() -> None:
    """Every epoch permutes anew and draws anew, the same way in every run; eval never changes."""
    first, again = source("train"), source("train")
    epochs = [[s for chunk, _ in first.read(0, first.extent, e) for s in samples_of(chunk)] for e in range(6)]
    assert epochs[2] == [s for chunk, _ in again.read(0, again.extent, 2) for s in samples_of(chunk)]
    orders = {tuple(by_user(first, epoch)) for epoch in range(6)}
    assert len(orders) > 3 and all(sorted(order) == sorted(by_user(first)) for order in orders)
    draws = {tuple(by_user(first, epoch)[66]["negatives"]) for epoch in range(6)}
    assert len(draws) == 6 and tuple(by_user(source("train", seed=2))[66]["negatives"]) not in draws
    assert list(by_user(source("eval"), 0).items()) == list(by_user(source("eval", seed=3), 5).items())


def test_negatives_are_uniform_over_the_catalogue() -> None:
    """Every item is drawn, and as often as chance allows (chi-square); an odd number of draws too."""
    one = source("train", max_length=30, negatives=2001)
    drawn = np.array(by_user(one)[66]["negatives"])
    counts = np.bincount(drawn - 100, minlength=100)
    assert len(counts) == 100 and len(drawn) == 2001 * 28
    expected = len(drawn) / 100
    assert ((counts - expected) ** 2 / expected).sum() < 99 + 4 * np.sqrt(2 * 99)
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.02


def test_synthetic_histories_are_pure() -> None:
    """A user's history does not depend on how many other users there are; ids are all of the catalogue."""
    few, many = (SequencesData(users=n, items=50, groups=5).open("eval", 3) for n in (20, 60))
    assert by_user(few) == {user: sample for user, sample in by_user(many).items() if user < 20}
    assert len(few.catalogue) == 50 and (np.diff(few.catalogue) > 0).all()
    assert np.isin(few.histories.items, few.catalogue).all()
    assert not np.isin(SequencesData(items=50).open("eval", 4).catalogue, few.catalogue).any()


def test_synthetic_histories_can_be_learned() -> None:
    """The item that most often followed the last one is the next one about as often as `order` says."""
    data = SequencesData(users=4000, items=300, groups=10, order=0.5)
    train, held_out = data.open("train", 0), data.open("eval", 0)
    (batch,) = Stream(train, 10**6)
    place = {item: i for i, item in enumerate(train.catalogue.tolist())}
    follows = np.zeros((300, 300))
    sparse = batch.sparse_features
    previous, following = (
        np.array([place[i] for i in sparse[name].values().tolist()]) for name in ("history", "target")
    )
    np.add.at(follows, (previous, following), 1)
    (test,) = Stream(held_out, 10**6)
    last = test.sparse_features["history"]
    guess = follows.argmax(1)[[place[i] for i in last.values()[last.offsets()[1:] - 1].tolist()]]
    hits = np.mean(train.catalogue[guess] == test.sparse_features["target"].values().numpy())
    assert 0.45 < hits < 0.75


def test_lengths_are_heavy_tailed() -> None:
    """The mean is what was asked for, and the longest history is many times that."""
    lengths = np.diff(SequencesData(users=5000, mean_length=40).open("train", 0).histories.offsets)
    assert lengths.min() >= 3 and lengths.mean() == pytest.approx(40, rel=0.1) and lengths.max() > 240


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"groups": 9, "items": 5}, r"data.groups must be at most data.items \(5\), not 9"),
        ({"mean_length": 2}, "data.mean_length must be at least 3, not 2"),
        ({"order": 1.0}, "data.order must be less than 1, not 1"),
        ({"negatives": -1}, "data.negatives must be at least 0, not -1"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], message: str) -> None:
    """A wrong value is refused when the section is made, and the message names the field."""
    with pytest.raises(ValueError, match=message):
        SequencesData(**fields)
