"""Ranking requests: windows, candidates, labels, and that they are what the events say."""

from __future__ import annotations

import numpy as np
import pytest

from nestpipe.data.long_histories import LongHistoriesData
from nestpipe.data.ranking_batches import RankingSource, last_cuts
from nestpipe.data.requests import window_start
from nestpipe.data.sequence_batches import Histories

LENGTHS = [3, 4, 5, 9, 40, 120]


def histories() -> Histories:
    """Items tell the user and the number of the event, actions the item, so that batches can be checked."""
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    items = np.concatenate([1000 * user + np.arange(n) for user, n in enumerate(LENGTHS)])
    times = np.concatenate([10 * np.arange(n) for n in LENGTHS])
    return Histories(np.arange(len(LENGTHS)), offsets, items, times, None, {"action": items % 4, "tab": items % 5})


@pytest.mark.parametrize("split", ["train", "eval"])
def test_requests_are_consecutive_events(split: str) -> None:
    """Promise: candidates are the events after the history, labels their actions, the request's time the first one's; a
    training request never touches held-out events."""
    source = RankingSource(histories(), np.arange(9), split, 7, 16, 4, ["a", "b"])
    seen = set()
    for epoch in range(5):
        for batch, _ in source.read(0, source.extent, epoch):
            part = {name: batch.sparse_features[name].to_dense() for name in source.features}
            for b in range(len(batch)):
                own = {name: values[b].numpy() for name, values in part.items()}
                user = int(batch.extras["user"][b])
                events = np.concatenate([own["history"], own["candidate"]]) - 1000 * user
                assert (np.diff(events) == 1).all() and events[0] == batch.extras["start"][b]
                n = len(own["history"])
                end = events[0] + n
                assert 1 <= n <= 16 and events[0] == window_start(int(end), 16)
                assert (own["time"] == 10 * events[: n + 1]).all()
                assert (own["action"] == own["history"] % 4).all() and (own["tab"] == own["history"] % 5).all()
                assert (own["label"] == own["candidate"] % 4).all()
                cut = last_cuts(np.array([LENGTHS[user]]), 4)[0]
                assert events[-1] < cut if split == "train" else (end == cut and events[-1] == LENGTHS[user] - 1)
                assert batch.loss_terms is not None and batch.loss_terms[b] == len(own["candidate"]) >= 1
                seen.add((user, int(end)))
        units = np.arange(source.extent)
        taken = source.take(units, epoch)
        tokens = taken.sparse_features["history"].lengths() + taken.sparse_features["candidate"].lengths()
        assert (source.lengths(units, epoch) == tokens.numpy()).all()
    assert {user for user, _ in seen} == set(range(len(LENGTHS)))
    assert split == "eval" or len({end for user, end in seen if user == 5}) > 2  # other places in other epochs


def long(**settings: object) -> LongHistoriesData:
    return LongHistoriesData(
        users=50, items=300, groups=10, median_length=60.0, max_length=32, candidates=8, **settings
    )  # type: ignore[arg-type]


def test_generated_actions_repeat() -> None:
    """Promise: what a user does at an event depends on (seed, user, event) alone; histories are those of next-item samples."""
    source = long().open("eval", 3)
    one, other = source.take(np.arange(20), 0), source.take(np.arange(10, 20), 0)
    for name in source.features:
        assert [x.tolist() for x in one.sparse_features[name].to_dense()[10:]] == [
            x.tolist() for x in other.sparse_features[name].to_dense()
        ]
    plain = LongHistoriesData(users=50, items=300, groups=10, median_length=60.0, max_length=500, negatives=1)
    whole = plain.open("eval", 3).take(np.arange(20), 0).sparse_features["history"].to_dense()
    for b in range(20):
        asked = one.sparse_features["candidate"].to_dense()[b].tolist()
        assert asked[:-1] == whole[b].tolist()[len(whole[b]) - len(asked) + 1 :]


def test_best_logits_are_the_best() -> None:
    """Promise: the chances that actions were drawn from are known, and tell them apart."""
    source = long().open("train", 3)
    batch = source.take(np.arange(50), 0)
    logits, masks = source.best_logits(batch), batch.sparse_features["label"].values().numpy()
    for action in range(2):
        did = (masks >> action) & 1 == 1
        assert 0.1 < did.mean() < 0.6
        chance = 1 / (1 + np.exp(-logits[:, action]))
        assert abs(did.mean() - chance.mean()) < 0.05
        assert logits[did, action].mean() > logits[~did, action].mean() + 0.5


@pytest.mark.parametrize(
    ("settings", "says"),
    [({"candidates": -1}, "candidates"), ({"actions": []}, "data.actions"), ({"actions": "a"}, "list")],
)
def test_bad_settings(settings: dict, says: str) -> None:
    """Promise: the error names the key."""
    with pytest.raises(ValueError, match=says):
        LongHistoriesData(**{"candidates": 4, **settings})
