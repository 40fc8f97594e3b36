"""Balanced streams: the same global batches as fixed ones, each sample once, resumed at any batch on any number of workers."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.data.balance.assign import assign
from nestpipe.data.balance.balanced_stream import BalancedStream
from nestpipe.data.balance.costs import Cost, CostFrom, CostPlan
from nestpipe.data.balance.expected import fixed_loads
from nestpipe.data.balance.token_stream import TokenStream
from nestpipe.data.batch import Batch
from nestpipe.data.clustering import cluster
from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.data.sequence_batches import Histories, SequenceSource
from nestpipe.data.shares import SharedStream
from nestpipe.data.source import is_indexed
from nestpipe.data.stream import Position
from tiny import samples_of

LENGTHS = st.lists(st.integers(3, 40), min_size=1, max_size=60)
PLAN = CostPlan([CostFrom(0, 0.0, 1.0, 1.0), CostFrom(2, 1.0, 0.0, 0.0)])
"""Two costs whose plans differ."""


def source_of(lengths: list[int], max_length: int = 20, piece: int = 512) -> SequenceSource:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    items = 100 + np.arange(offsets[-1])
    histories = Histories(np.arange(len(lengths)) * 11, offsets, items, 1000 + items)
    source = SequenceSource(histories, np.arange(100, 200), "train", 1, max_length, 2)
    source.piece = piece
    return source


def balanced(source: SequenceSource, size: int, workers: int, **options: Any) -> list[BalancedStream]:
    return [BalancedStream(source, size, PLAN, rank=rank, workers=workers, **options) for rank in range(workers)]


def steps_of(streams: list[Any]) -> list[list[Batch]]:
    """Per step the batches of all workers that still had one."""
    rounds = itertools.zip_longest(*(list(stream) for stream in streams))
    return [[batch for batch in one if batch is not None] for one in rounds]


def samples(batches: list[Batch]) -> Counter[bytes]:
    return Counter(sample for batch in batches for sample in samples_of(batch))


@pytest.mark.parametrize("kind", ["sequences", "movielens-sequences", "interactions"])
@pytest.mark.parametrize("split", ["train", "eval"])
def test_an_index_tells_what_reading_gives(kinds: dict[str, Any], kind: str, split: str) -> None:
    """Any samples in any order, features and weights of events included; their lengths are those of their histories."""
    source = kinds[kind].open(split, 5)
    assert is_indexed(source)
    for epoch in (0, 3):
        chunks = [chunk for chunk, _ in source.read(0, source.extent, epoch)]
        whole = [sample for chunk in chunks for sample in samples_of(chunk)]
        units = np.random.default_rng(epoch).permutation(source.extent)[:50]
        taken = source.take(units, epoch)
        assert samples_of(taken) == [whole[unit] for unit in units]
        assert source.lengths(units, epoch).tolist() == taken.sparse_features["history"].lengths().tolist()
    lengths = source.lengths(np.arange(source.extent), 0)
    assert source.mean_length == pytest.approx(lengths.mean()) and lengths.dtype == np.int64
    assert len(source.take(np.empty(0, np.int64), 0)) == 0


@settings(deadline=None, max_examples=40)
@given(
    LENGTHS, st.integers(1, 9), st.integers(1, 5), st.integers(1, 5), st.integers(1, 3), st.sampled_from([1, 3, 512])
)
def test_global_batches_are_those_of_fixed_streams(
    lengths: list[int], size: int, workers: int, streams: int, epochs: int, piece: int
) -> None:
    """Whatever the numbers of workers and streams: same samples, same negatives, same positions, step by step."""
    source = source_of(lengths, piece=piece)
    fixed = [
        SharedStream(source, size, rank=rank, workers=workers, streams=streams, epochs=epochs)
        for rank in range(workers)
    ]
    ours = balanced(source, size, workers, streams=streams, epochs=epochs)
    want, have = steps_of(fixed), steps_of(ours)
    assert [samples(step) for step in have] == [samples(step) for step in want]
    for step in range(len(want) + 1):
        at = {number: position for stream in fixed for number, position in stream.positions_after(step).items()}
        assert all(stream.positions_after(step) == at for stream in ours)
    assert {stream.fraction() for stream in ours} == {min(stream.fraction() for stream in fixed)}
    for stream in (*fixed, *ours):
        stream.close()


@settings(deadline=None, max_examples=40)
@given(LENGTHS, st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.data())
def test_other_workers_resume_at_any_batch(
    lengths: list[int], size: int, before: int, after: int, data: st.DataObject
) -> None:
    """No sample is lost or trained twice, and the same number of workers gets the same batches."""
    source = source_of(lengths)
    whole = steps_of(balanced(source, size, before, epochs=2))
    cut = data.draw(st.integers(0, len(whole)))
    first = balanced(source, size, before, epochs=2)
    for _ in range(cut):
        for stream in first:
            next(stream)
    at = first[0].positions_after(cut)
    for stream in first:
        stream.close()
    for workers in (before, after):
        rest = balanced(source, size, workers, streams=before, epochs=2, positions=at, first_batch=cut)
        found = steps_of(rest)
        assert [samples(step) for step in found] == [samples(step) for step in whole[cut:]]
        if workers == before:
            assert [list(map(samples_of, step)) for step in found] == [
                list(map(samples_of, step)) for step in whole[cut:]
            ]


def test_every_worker_gets_what_the_plan_says() -> None:
    """Costs by batch number; a worker without a sample still has a batch; loads and costs are those of its samples."""
    source = source_of([30, 4, 5, 4])
    streams = balanced(source, 1, 3, streams=2, epochs=1)
    steps = steps_of(streams)
    assert [sorted(len(batch) for batch in step) for step in steps] == [[0, 1, 1], [0, 1, 1]]
    for number, step in enumerate(steps):
        for stream, batch in zip(streams, step):
            n = batch.sparse_features["history"].lengths().numpy()
            cost = PLAN.known(number)
            assert batch.costs is not None and batch.costs.tolist() == cost.of(n).tolist()
            mine = stream.loads.take(number)
            assert mine[:3].tolist() == [len(n), n.sum(), (n * n).sum()]
    assert np.isnan(streams[0].loads.take(7)[3:]).all() and not streams[0].loads.take(7)[:3].any()


def test_fixed_loads_are_those_of_fixed_batches() -> None:
    """What the report says a fixed batch would have cost, from the plan and from the index."""
    source, cost = source_of(list(range(3, 40))), Cost(1.0, 2.0, 0.5)
    streams = [BalancedStream(source, 4, CostPlan([CostFrom(0, 1.0, 2.0, 0.5)]), rank=r, workers=3) for r in range(3)]
    fixed = [SharedStream(source, 4, rank=r, workers=3) for r in range(3)]
    expected = list(fixed_loads(source, 4, 3, 3, 1, cost))
    steps_of(streams)
    for number, step in enumerate(itertools.zip_longest(*fixed)):
        costs = [0.0 if b is None else cost.of(b.sparse_features["history"].lengths().numpy()).sum() for b in step]
        assert expected[number].tolist() == costs
        assert [cost.of_sums(stream.loads.take(number)[3:]) for stream in streams] == pytest.approx(costs)


def test_streams_in_two_epochs_take_each_sample_from_its_own() -> None:
    """One stream ends its epoch a batch before the other: negatives are those of each one's epoch."""
    source = source_of([5] * 5)
    want = steps_of([SharedStream(source, 1, rank=r, workers=2, epochs=3) for r in range(2)])
    have = steps_of(balanced(source, 1, 2, epochs=3))
    assert [samples(step) for step in have] == [samples(step) for step in want]


@settings(deadline=None, max_examples=60)
@given(LENGTHS, st.integers(1, 90), st.integers(1, 4), st.sampled_from([1, 3, 512]))
def test_token_batches_are_full_and_complete(lengths: list[int], budget: int, workers: int, piece: int) -> None:
    """Each sample once an epoch; a batch is within the budget or one sample, and the next one would not have fitted."""
    source = source_of(lengths, piece=piece)
    found: list[Batch] = []
    for rank in range(workers):
        stream = TokenStream(source, budget, rank=rank, workers=workers)
        mine = list(stream)
        for batch in mine:
            assert batch.costs is not None
            assert batch.costs.tolist() == batch.sparse_features["history"].lengths().tolist()
            assert batch.costs.sum() <= budget or len(batch) == 1
        for batch, after in itertools.pairwise(mine):
            assert batch.costs is not None and after.costs is not None
            assert batch.costs.sum() + after.costs[0] > budget
        found += mine
    assert samples(found) == samples([source.take(np.arange(source.extent), 0)])


@settings(deadline=None, max_examples=30)
@given(LENGTHS, st.integers(5, 60), st.integers(1, 3), st.integers(1, 4), st.data())
def test_token_streams_resume_on_other_workers(
    lengths: list[int], budget: int, before: int, after: int, data: st.DataObject
) -> None:
    """Streams keep their budget: global batches stay what they were."""
    source = source_of(lengths)

    def shared(workers: int, positions: dict[int, Position] | None = None) -> list[SharedStream]:
        where: dict[str, Any] = {"workers": workers, "streams": before, "epochs": 2, "token_budget": budget}
        return [SharedStream(source, 1, rank=rank, positions=positions, **where) for rank in range(workers)]

    whole = steps_of(shared(before))
    cut = data.draw(st.integers(0, len(whole)))
    first = shared(before)
    for stream in first:
        for _ in range(cut):
            next(stream, None)
    at = {number: position for stream in first for number, position in stream.positions_after(cut).items()}
    for stream in first:
        stream.close()
    assert [samples(step) for step in steps_of(shared(after, at))] == [samples(step) for step in whole[cut:]]


def test_a_stream_that_waits_for_a_cost_can_be_closed() -> None:
    stream = BalancedStream(source_of([9] * 50), 1, CostPlan([CostFrom(0, 0.0, 1.0, 0.0)], every=1), epochs=None)
    next(stream)
    stream.close()
    assert list(stream) == []


def batch_of(costs: list[float]) -> Batch:
    ids = torch.arange(len(costs)) % 3
    features = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(len(costs), dtype=torch.int64))
    return Batch(features, labels=torch.arange(len(costs)), costs=torch.tensor(costs, dtype=torch.float64))


@given(st.lists(st.floats(0, 100), max_size=30), st.integers(1, 8))
def test_micro_batches_are_split_by_cost(costs: list[float], parts: int) -> None:
    """Every sample once, in the batch's order within a part, where the plan puts it."""
    batch = batch_of(costs)
    found = batch.split(parts)
    chosen = assign(np.array(costs), parts)
    assert len(found) == parts
    for part, one in enumerate(found):
        assert one.labels is not None and one.costs is not None
        assert one.labels.tolist() == (
            np.flatnonzero(chosen == part).tolist() if parts > 1 else list(range(len(costs)))
        )
        assert one.costs.tolist() == [costs[i] for i in one.labels.tolist()]


def test_clustering_wins_and_evens_out_costs() -> None:
    """With clustering, samples that share keys stay together, and it is costs that are even, not counts."""
    costs = [6.0, 1, 1, 1, 1, 1, 1]
    parts = cluster(batch_of(costs), 2)
    assert sorted(float(part.costs.sum()) for part in parts if part.costs is not None) == [6, 6]
    assert sorted(len(part) for part in parts) == [1, 6]


def test_costs_are_one_number_a_sample() -> None:
    with pytest.raises(ValueError, match=r"batch.costs must be one number a sample"):
        Batch(batch_of([1, 2]).sparse_features, costs=torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"batch.costs has shape \(3,\), but the batch has 2 samples"):
        Batch(batch_of([1, 2]).sparse_features, costs=torch.ones(3))


def test_a_model_never_sees_costs() -> None:
    """They stay on the host: nothing of them is copied to a device."""
    batch = batch_of([1, 2])
    moved = batch.to(torch.device("meta"))
    assert moved.costs is batch.costs and all(tensor.is_meta for tensor in moved.tensors())


def test_a_resumed_stream_numbers_its_batches_on() -> None:
    """Costs that hold from a batch on hold from the same one after a resume."""
    source = source_of([30, 4, 5, 6, 7, 8] * 8)
    whole = steps_of(balanced(source, 6, 2))
    first = balanced(source, 6, 2)
    next(first[0])
    at = first[0].positions_after(1)
    first[0].close()
    rest = steps_of(balanced(source, 6, 2, positions=at, first_batch=1))
    assert [list(map(samples_of, step)) for step in rest] == [list(map(samples_of, step)) for step in whole[1:]]
    wrong = steps_of(balanced(source, 6, 2, positions=at))
    assert [list(map(samples_of, step)) for step in wrong] != [list(map(samples_of, step)) for step in whole[1:]]
