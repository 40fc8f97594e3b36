"""Clustering: every sample in exactly one micro-batch, sizes as without it, the same parts every time, and fewer rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe import Batch, KeyedJaggedTensor
from nestpipe.data.clustering import cluster, part_of_samples


def features_of(samples: list[list[list[int]]], count: int) -> KeyedJaggedTensor:
    """samples[b][f]: the ids of feature f of sample b."""
    ids = [i for f in range(count) for sample in samples for i in sample[f]]
    lengths = [len(sample[f]) for f in range(count) for sample in samples]
    return KeyedJaggedTensor(
        [f"f{f}" for f in range(count)],
        torch.tensor(ids, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        stride=len(samples),
    )


ids = st.lists(st.one_of(st.integers(0, 6), st.sampled_from([-(2**63), 2**63 - 1])), max_size=4)


@given(st.integers(1, 3).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.lists(ids, min_size=n, max_size=n), max_size=40))),
       st.integers(1, 9))  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_every_sample_in_one_part(drawn: tuple[int, list[list[list[int]]]], parts: int) -> None:
    """Whatever the ids, lengths and sizes: the same samples with the same fields, in parts as large as `split` makes them."""
    count, samples = drawn
    batch = Batch(features_of(samples, count), labels=torch.arange(len(samples)))
    found = cluster(batch, parts)
    assert [len(p) for p in found] == [len(p) for p in batch.split(parts)]
    assert sorted(int(label) for p in found for label in p.labels) == list(range(len(samples)))
    for part in found:
        for b, label in enumerate(part.labels):
            for f, key in enumerate(part.sparse_features.keys()):
                jagged = part.sparse_features[key]
                start = int(jagged.lengths()[:b].sum())
                assert jagged.values()[start : start + int(jagged.lengths()[b])].tolist() == samples[int(label)][f]
    again = cluster(batch, parts)
    assert all(torch.equal(a.labels, b.labels) for a, b in zip(found, again))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(1, 9), st.integers(0, 2**31 - 1))
@settings(max_examples=100, deadline=None)
def test_histories_are_divided_evenly_by_tokens(lengths: list[int], parts: int, seed: int) -> None:
    """Promise: each part's tokens are within the longest history of an even share, and every history is in one part."""
    random = np.random.default_rng(seed)
    ids = torch.from_numpy(random.integers(0, 50, sum(lengths)))
    features = KeyedJaggedTensor(["history"], ids, lengths=torch.tensor(lengths))
    batch = Batch(features, labels=torch.arange(len(lengths)), loss_terms=torch.tensor(lengths, dtype=torch.float32))
    found = cluster(batch, parts)
    assert sorted(int(label) for p in found for label in p.labels) == list(range(len(lengths)))
    for part in found:
        assert part.terms() <= sum(lengths) / parts + max(lengths)


def rows_sent(features: KeyedJaggedTensor, parts: np.ndarray, count: int) -> int:
    """Unique (feature, id) pairs, summed over parts."""
    samples, offsets = features.stride(), features.offsets().numpy()
    bags = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    pairs = np.stack([bags // samples, features.values().numpy()], axis=1)
    return sum(len(np.unique(pairs[parts[bags % samples] == p], axis=0)) for p in range(count))


@pytest.mark.parametrize("parts", [4, 8, 32])
def test_samples_of_one_interest_meet(parts: int) -> None:
    """200 groups of interest: at least a fifth fewer rows than a random division sends."""
    random = np.random.default_rng(1)
    groups = random.integers(0, 200, 1024)
    near = groups[:, None] * 50 + random.integers(0, 50, (1024, 20))
    chosen = np.where(random.random((1024, 20)) < 0.8, near, random.integers(0, 100_000, (1024, 20)))
    features = KeyedJaggedTensor(["h"], torch.from_numpy(chosen.reshape(-1)), lengths=torch.full((1024,), 20))
    any_part = random.permutation(np.arange(1024) * parts // 1024)
    clustered = rows_sent(features, part_of_samples(features, parts), parts)
    assert clustered < 0.8 * rows_sent(features, any_part, parts)
