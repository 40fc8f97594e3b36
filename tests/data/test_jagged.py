"""Jagged tensors and batches: selecting, splitting and joining lose nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nestpipe.data.batch import Batch
from nestpipe.data.jagged import JaggedTensor, KeyedJaggedTensor
from tiny import samples_of


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """0 to 3 features of 0 to 6 samples with 0 to 3 ids, with and without the other fields."""
    features, count = draw(st.integers(1, 3)), draw(st.integers(0, 6))
    lengths = draw(st.lists(st.integers(0, 3), min_size=features * count, max_size=features * count))
    ids = st.integers(-(2**63), 2**63 - 1)
    values = torch.tensor(draw(st.lists(ids, min_size=sum(lengths), max_size=sum(lengths))), dtype=torch.int64)
    weights = torch.arange(sum(lengths), dtype=torch.float32) if draw(st.booleans()) else None
    names = [f"f{f}" for f in range(features)]
    rest = torch.arange(count, dtype=torch.float32)
    return Batch(
        KeyedJaggedTensor(names, values, weights, lengths=torch.tensor(lengths, dtype=torch.int64), stride=count),
        rest[:, None] + torch.arange(2) if draw(st.booleans()) else None,
        rest if draw(st.booleans()) else None,
        {"user": torch.arange(count)},
        rest + 1 if draw(st.booleans()) else None,
    )


def weights_of(batch: Batch) -> list[list[float]] | None:
    sparse = batch.sparse_features
    if sparse.weights_or_none() is None:
        return None
    per_feature = [torch.split(sparse[f].weights(), sparse[f].lengths().tolist()) for f in sparse.keys()]  # noqa: SIM118
    return [[w for feature in per_feature for w in feature[b].tolist()] for b in range(len(batch))]


@settings(max_examples=60, deadline=None)
@given(batches(), st.data())
def test_select_takes_whole_samples(batch: Batch, data: st.DataObject) -> None:
    """Any samples, in any order and as often as asked for, come with all that belongs to them."""
    numbers = st.lists(st.integers(0, len(batch) - 1), max_size=8) if len(batch) else st.just([])
    chosen = data.draw(numbers)
    taken = batch.select(torch.tensor(chosen, dtype=torch.int64))
    assert len(taken) == len(chosen)
    assert samples_of(taken) == [samples_of(batch)[b] for b in chosen]
    weights = weights_of(batch)
    assert weights_of(taken) == (None if weights is None else [weights[b] for b in chosen])


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 9))
def test_split_and_concat_are_inverse(batch: Batch, parts: int) -> None:
    """Cutting a batch and joining the parts gives it back, also when some parts have no sample."""
    pieces = batch.split(parts)
    assert len(pieces) == parts
    if batch.loss_terms is None:
        assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
    again = Batch.concat(pieces)
    assert samples_of(again) == samples_of(batch) and weights_of(again) == weights_of(batch)
    assert torch.equal(again.sparse_features.values(), batch.sparse_features.values())
    assert torch.equal(again.sparse_features.lengths(), batch.sparse_features.lengths())
    assert sum(piece.terms() for piece in pieces) == batch.terms()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 9))
@example([0, 0, 0], 2)
@example([200] + [1] * 30, 4)
def test_split_divides_terms_evenly(terms: list[int], parts: int) -> None:
    """Promise: histories of any lengths make micro-batches whose terms differ by no more than the longest of them."""
    ids = torch.arange(len(terms))
    features = KeyedJaggedTensor(["f"], ids, lengths=torch.ones(len(terms), dtype=torch.int64))
    pieces = Batch(features, loss_terms=torch.tensor(terms, dtype=torch.float32)).split(parts)
    assert len(pieces) == parts
    assert torch.equal(torch.cat([piece.sparse_features.values() for piece in pieces]), ids)
    for piece in pieces:
        assert abs(piece.terms() - sum(terms) / parts) <= max([*terms, 0])


@settings(max_examples=30, deadline=None)
@given(batches())
def test_a_keyed_jagged_tensor_is_its_features(batch: Batch) -> None:
    """Taking the features apart and putting them together gives the same tensor."""
    sparse = batch.sparse_features
    again = KeyedJaggedTensor.from_jt_dict(sparse.to_dict())
    assert again.keys() == sparse.keys() and torch.equal(again.values(), sparse.values())
    assert torch.equal(again.lengths(), sparse.lengths()) and torch.equal(again.offsets(), sparse.offsets())


def test_padding_cuts_and_fills() -> None:
    """Samples are left-aligned, cut at the desired length and filled up with the padding value."""
    jagged = JaggedTensor(torch.arange(6), lengths=torch.tensor([3, 0, 1, 2]))
    assert jagged.to_padded_dense(2, -1).tolist() == [[0, 1], [-1, -1], [3, -1], [4, 5]]
    assert jagged.to_padded_dense().tolist() == [[0, 1, 2], [0, 0, 0], [3, 0, 0], [4, 5, 0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([1])), "add up to 1, but there are 3"),
        (lambda: KeyedJaggedTensor(["a", "a"], torch.arange(2), lengths=torch.ones(2)), "a feature twice"),
        (lambda: KeyedJaggedTensor(["a"], torch.rand(1), lengths=torch.ones(1)), "must be int64"),
        (lambda: KeyedJaggedTensor(["a"], torch.arange(3)), "needs lengths or offsets"),
        (lambda: KeyedJaggedTensor(["a"], torch.arange(1), torch.rand(2), lengths=torch.ones(1)), "per-sample weights"),
    ],
)
def test_what_does_not_fit_together_is_refused(make: object, message: str) -> None:
    """A tensor whose parts contradict each other is an error that says which."""
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_loss_terms_are_one_number_a_sample() -> None:
    features = KeyedJaggedTensor(["f"], torch.arange(3), lengths=torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"batch.loss_terms must be one number a sample, not of shape \(3, 1\)"):
        Batch(features, loss_terms=torch.ones(3, 1))


@pytest.mark.parametrize(
    "offsets", [[0, 3, 2, 4], [0, 1, 2, 3, 4], [1, 2, 3, 4], [0, 1, 1000, 4], [0, 2, 3, 4]], ids=str
)
def test_offsets_and_lengths_that_contradict_each_other(offsets: list[int]) -> None:
    """Promise: kernels that go by offsets never meet others than the lengths that were checked."""
    lengths, given_ = torch.tensor([1, 1, 2]), torch.tensor(offsets)
    with pytest.raises(ValueError, match=r"offsets and lengths do not belong together|lengths add up"):
        KeyedJaggedTensor(["a"], torch.arange(4), lengths=lengths, offsets=given_)
    with pytest.raises(ValueError, match="offsets and lengths do not belong together"):
        JaggedTensor(torch.arange(4), lengths=lengths, offsets=given_)
    KeyedJaggedTensor(["a"], torch.arange(4), lengths=lengths, offsets=torch.tensor([0, 1, 2, 4]))
