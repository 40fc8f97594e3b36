"""Draws of negatives: chances, pools of whole batches, and what is refused."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.data.batch import Batch
from nestpipe.data.counter import derive
from nestpipe.data.interactions.data import InteractionsData
from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.data.movielens import MovieLensData
from nestpipe.data.negatives import Negatives, Sampler, chances_of
from nestpipe.data.sequence_batches import Histories, SequenceSource
from nestpipe.data.sequences import SequencesData
from nestpipe.data.shares import SharedStream
from nestpipe.data.source import Source
from nestpipe.data.stream import Position
from tiny import write_events

POOLED = {"negatives_from": "pool", "negatives": 6}


def sequences(**settings: Any) -> SequenceSource:
    settings = {"users": 61, "items": 40, "groups": 4, "max_length": 5, "mean_length": 6.0, **settings}
    return SequencesData(**settings).open("train", 3)


def streams(source: Source, workers: int, of: int | None = None, **options: Any) -> list[SharedStream]:
    return [SharedStream(source, 4, rank=r, workers=workers, streams=of, **options) for r in range(workers)]


def pools(source: Source, workers: int, of: int | None = None, **options: Any) -> list[list[int]]:
    """The pool of every global batch; all workers have the same one."""
    made = []
    for batches in zip_longest(*streams(source, workers, of, **options)):
        found = {tuple(b.shared["negatives"].tolist()) for b in batches if b is not None}
        assert len(found) == 1
        made.append(list(found.pop()))
    return made


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40).filter(lambda chances: sum(chances) > 1e-3))
def test_alias_tables_hold_the_chances(weights: list[float]) -> None:
    """Promise: the chance of every item is what was asked for, to 2^-32 of a place; 0 is never drawn."""
    sampler = Sampler.of(np.arange(len(weights)), np.array(weights))
    places = len(weights)
    stays = np.minimum(sampler.keep.astype(np.float64) / 2**32, 1)
    chances = stays / places + np.bincount(sampler.alias, (1 - stays) / places, minlength=places)
    np.testing.assert_allclose(chances, sampler.chances, atol=places * 2.0**-31)
    drawn = sampler.draw(200, derive(0, "test"))
    assert all(sampler.chances[item] > 0 for item in drawn)


def test_draws_follow_the_chances() -> None:
    """Promise: as often as chance allows (chi-square), and unrelated to each other."""
    chances = np.array([0.5, 0.25, 0.125, 0.1, 0.025])
    drawn = Sampler.of(np.arange(5), chances).draw(40_000, derive(1, "test"))
    expected = 40_000 * chances
    assert ((np.bincount(drawn) - expected) ** 2 / expected).sum() < 4 + 4 * np.sqrt(2 * 4)
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.02


def test_chances_by_hand() -> None:
    """Promise: log-uniform over ranks of popularity, of which equal ones keep the order of ids."""
    counts = np.array([1, 5, 0, 5])
    by_rank = np.log([2 / 1, 3 / 2, 4 / 3, 5 / 4]) / np.log(5)
    np.testing.assert_allclose(chances_of("log-uniform", counts), by_rank[[2, 0, 3, 1]])
    np.testing.assert_allclose(chances_of("popularity", counts), counts / 11)
    assert chances_of("uniform", counts) is None
    rarest = Sampler.of(np.arange(4), chances_of("popularity", counts)).log_chances()
    assert rarest is not None
    np.testing.assert_allclose(rarest, np.log([1 / 11, 5 / 11, 1 / 11, 5 / 11]))


@pytest.mark.parametrize("chances", [[], [0.0, 0.0], [1.0, -1.0], [float("nan"), 1.0], [1.0]])
def test_bad_chances_are_refused(chances: list[float]) -> None:
    with pytest.raises(ValueError, match="a chance for each item"):
        Sampler.of(np.arange(2), np.array(chances))


def test_popular_items_are_drawn_for_each_target() -> None:
    """Promise: popularity is that of training, and the number of negatives stays."""
    source = sequences(negatives=50, sampling="popularity")
    (batch,) = SharedStream(source, 100)
    drawn = batch.sparse_features["negatives"].values().numpy()
    assert len(drawn) == 50 * batch.terms()
    counts = np.bincount(np.searchsorted(source.catalogue, drawn), minlength=40)
    popular = source.popularity()
    assert not counts[popular == 0].any() and np.corrcoef(counts, popular)[0, 1] > 0.98


@pytest.mark.parametrize("sampling", ["uniform", "log-uniform", "popularity", "in-batch"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_pool_is_that_of_the_global_batch(sampling: str, workers: int) -> None:
    """Promise: the same on every worker, on any number of workers of as many streams, anew in every batch."""
    source = sequences(sampling=sampling, **POOLED)
    found = pools(source, workers, of=3, epochs=2)
    assert found == pools(source, 3, epochs=2) and all(len(pool) == 6 for pool in found)
    assert len({tuple(pool) for pool in found}) > len(found) - 3


def test_samples_of_a_pooled_source_have_no_negatives_of_their_own() -> None:
    for batch in SharedStream(sequences(**POOLED), 4):
        assert batch.sparse_features["negatives"].values().numel() == 0


@settings(deadline=None, max_examples=25)
@given(st.integers(3, 40), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(1, 9))
def test_in_batch_pools_are_targets_of_the_batch(
    users: int, workers: int, batch_size: int, epochs: int, piece: int
) -> None:
    """Promise: only targets of the batch that all workers train at a time, whatever the shards; streams may drift."""
    lengths = np.random.default_rng(users).integers(3, 9, users)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    items = np.arange(offsets[-1])  # every event its own item: an id tells where it comes from
    histories = Histories(np.arange(users), offsets, items, items)
    negatives = Negatives(30, "pool", "in-batch")
    source = SequenceSource(histories, items, "train", 1, 4, negatives)
    source.piece = piece
    made = [SharedStream(source, batch_size, rank=r, workers=workers, epochs=epochs) for r in range(workers)]
    for batches in zip_longest(*made):
        real = [b for b in batches if b is not None]
        targets = {int(i) for b in real for i in b.sparse_features["target"].values()}
        pool = real[0].shared["negatives"].tolist()
        assert len(pool) == 30 and set(pool) <= targets
        assert all(b.shared["negatives"].tolist() == pool for b in real)


def test_in_batch_draws_every_target_alike() -> None:
    """Promise: a target is drawn as often as any other (chi-square)."""
    source = sequences(users=20, sampling="in-batch", negatives=20_000, negatives_from="pool")
    (batch,) = SharedStream(source, 20)
    targets = np.searchsorted(source.catalogue, batch.sparse_features["target"].values().numpy())
    drawn = np.searchsorted(source.catalogue, batch.shared["negatives"].numpy())
    expected = 20_000 * np.bincount(targets, minlength=40) / len(targets)
    there = expected > 0
    found = np.bincount(drawn, minlength=40)
    assert not found[~there].any()
    assert ((found - expected)[there] ** 2 / expected[there]).sum() < there.sum() + 4 * np.sqrt(2 * there.sum())


def test_chances_of_in_batch_negatives_are_those_of_targets() -> None:
    """Promise: log q is of what is drawn: targets, within the longest history."""
    source = sequences(sampling="in-batch", **POOLED)
    (batch,) = SharedStream(source, 100)
    targets = np.searchsorted(source.catalogue, batch.sparse_features["target"].values().numpy())
    np.testing.assert_allclose(source.sampler.chances, np.bincount(targets, minlength=40) / len(targets))


def test_a_pool_goes_on_where_the_run_went_on() -> None:
    """Promise: batch k has the same pool, whether the run was interrupted before it or not."""
    for sampling in ("uniform", "in-batch"):
        source = sequences(sampling=sampling, **POOLED)
        whole = pools(source, 2, epochs=2)
        made = streams(source, 2, epochs=2)
        for _ in range(5):
            for stream in made:
                next(stream)
        positions: dict[int, Position] = {}
        for stream in made:
            positions |= stream.positions_after(5)
            stream.close()
        assert pools(source, 2, epochs=2, positions=positions, first=5) == whole[5:]


def test_shared_ids_are_in_every_micro_batch() -> None:
    """Promise: a part has all of them, in its first sample, and other features stay as they are."""
    features = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(9),
        torch.arange(9, dtype=torch.float32),
        lengths=torch.tensor([1, 2, 3, 1, 0, 2]),
    )
    batch = Batch(features, shared={"b": torch.tensor([2**62, 5])})
    parts = [part.with_shared_ids() for part in batch.split(2)]
    assert [part.sparse_features["b"].values().tolist() for part in parts] == [[2**62, 5, 6], [2**62, 5, 7, 8]]
    assert [part.sparse_features["b"].weights().tolist() for part in parts] == [[1, 1, 6], [1, 1, 7, 8]]
    assert [part.sparse_features["b"].lengths().tolist() for part in parts] == [[3], [2, 2]]
    assert [part.sparse_features["a"].values().tolist() for part in parts] == [[0], [1, 2, 3, 4, 5]]
    empty = batch.select(torch.arange(0))
    assert empty.with_shared_ids() is empty
    assert Batch.concat([batch, batch]).shared["b"].tolist() == [2**62, 5]
    with pytest.raises(ValueError, match=r"different batch.shared\['b'\]"):
        Batch.concat([batch, Batch(features)])
    with pytest.raises(ValueError, match="must be a list of int64 ids"):
        Batch(features, shared={"b": torch.tensor([0.5])})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"negatives_from": "none"}, "data.negatives_from must be 'each' or 'pool', not 'none'"),
        (
            {"sampling": "zipf"},
            "data.sampling must be 'uniform', 'log-uniform', 'popularity' or 'in-batch', not 'zipf'",
        ),
        ({"sampling": "in-batch"}, "data.sampling = 'in-batch' .*: set data.negatives_from = 'pool'"),
        ({"negatives_from": "pool", "negatives": 0}, "data.negatives must be at least 1"),
        ({"negatives": -1}, "data.negatives must be at least 0, not -1"),
        ({"negatives": True}, "data.negatives must be a whole number, not True"),
    ],
)
@pytest.mark.parametrize("kind", [SequencesData, MovieLensData, InteractionsData])
def test_bad_fields_are_named(kind: type, fields: dict[str, Any], message: str) -> None:
    where = {MovieLensData: {"path": "u.data"}, InteractionsData: {"paths": "log"}}.get(kind, {})
    with pytest.raises(ValueError, match=message):
        kind(**where, **fields)


def test_streamed_histories_have_no_in_batch_negatives() -> None:
    """Promise: what cannot be exact is refused, and the message says what to take instead."""
    with pytest.raises(ValueError, match=r"leave data.shuffle out, or set data.sampling = 'popularity'"):
        InteractionsData("log", negatives_from="pool", sampling="in-batch", shuffle=100)


@pytest.mark.parametrize("drawn_for", ["each", "pool"])
def test_streamed_histories_are_sampled_by_popularity(tmp_path: Any, drawn_for: str) -> None:
    """Promise: histories in files have the samplers, too."""
    log = write_events(tmp_path / "log")
    settings: dict[str, Any] = {"cache": str(tmp_path / "cache"), "shuffle": 20, "sampling": "popularity"}
    source = InteractionsData(str(log), negatives=8, negatives_from=drawn_for, **settings).open("train", 1)  # type: ignore[arg-type]
    chances = source.sampler.log_chances()
    assert chances is not None and len(chances) == len(source.catalogue)
    batches = list(SharedStream(source, 16))
    each = [b.sparse_features["negatives"].values().numel() for b in batches]
    shared = [b.shared["negatives"].numel() if b.shared else 0 for b in batches]
    terms = [int(8 * b.terms()) for b in batches]
    assert (each, shared) == (
        (terms, [0] * len(batches)) if drawn_for == "each" else ([0] * len(batches), [8] * len(batches))
    )
