"""Kernels of the models: each against the same in plain torch."""

from __future__ import annotations

from unittest import mock

import numba
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import oracle
import samples
from nestpipe import Batch, KeyedJaggedTensor
from nestpipe.data.jagged import JaggedTensor
from nestpipe.models import timed
from nestpipe.models.dlrm import DenseArch, DLRMConfig
from nestpipe.ops import attention, interaction, relative_bias, sampled_softmax
from nestpipe.ops.attention_kernels import sigmoid
from oracle import distance

CLOSE = 1e-12


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 2**32))
def test_relative_bias_in_three_ways(lengths: list[int], seed: int) -> None:
    """Promise: the kernel, what a device runs, and plain torch give one bias and one gradient."""
    torch.manual_seed(seed % 2**31)
    n = max(lengths)
    times = [torch.sort(torch.randint(0, 10 ** int(torch.randint(1, 10, ())), (l + 1,)))[0] for l in lengths]
    time = JaggedTensor.from_dense(times)
    bucket = relative_bias.time_buckets(time, n)
    assert torch.equal(bucket, oracle.plain_time_buckets(time, n))
    count = torch.tensor(lengths)
    place = torch.randn(13, dtype=torch.float64, requires_grad=True)
    by_time = torch.randn(relative_bias.TIME_BUCKETS + 1, dtype=torch.float64, requires_grad=True)
    found = relative_bias.relative_bias(place, by_time, bucket, count)
    wanted = oracle.plain_relative_bias(place, by_time, bucket, count)
    on_device = relative_bias._bias_with_torch(place.detach(), by_time.detach(), bucket, count)
    assert torch.equal(found, wanted) and torch.equal(found, on_device)
    grad = torch.randn_like(found)
    ours = torch.autograd.grad(found, [place, by_time], grad)
    theirs = torch.autograd.grad(wanted, [place, by_time], grad)
    device = [torch.zeros_like(place), torch.zeros_like(by_time)]
    relative_bias._bias_backward_with_torch(grad, bucket, count, *device)
    for a, b, c in zip(ours, theirs, device):
        assert distance(a.numpy(), b.numpy()) <= CLOSE and distance(c.detach().numpy(), b.numpy()) <= CLOSE


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 5), st.integers(1, 4), st.integers(2, 9), st.booleans(), st.integers(0, 2**31 - 1))
@example(3, 2, 4, True, 0)
def test_indexed_cosines_in_three_ways(queries: int, each: int, dim: int, tiny: bool, seed: int) -> None:
    """Promise: the kernel, what a device runs, and plain torch give the same cosines and the same gradients, also of vectors
    that are too short to have a direction.  (In one dimension every gradient is 0, and so is nothing but rounding.)"""
    torch.manual_seed(seed)
    q = torch.randn(queries, dim, dtype=torch.float64)
    rows = torch.randn(4, dim, dtype=torch.float64)
    if tiny:
        q[::2] *= 1e-9
        rows[0] = 0
    q.requires_grad_(), rows.requires_grad_()
    index = torch.randint(0, 4, (queries, each), dtype=torch.int32)
    ways = sampled_softmax.indexed_cosines, oracle.plain_indexed_cosines, sampled_softmax._cosines_with_torch
    (found, wanted, on_device) = (way(q, rows, index) for way in ways)
    grad = torch.randn_like(found)
    ours, theirs, device = (torch.autograd.grad(out, [q, rows], grad) for out in (found, wanted, on_device))
    for a, b in [(found, wanted), (on_device, wanted), *zip(ours, theirs), *zip(device, theirs)]:
        assert distance(a.detach().numpy(), b.detach().numpy()) <= CLOSE


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 5), st.integers(1, 11), st.integers(1, 40), st.booleans(), st.integers(0, 2**31 - 1))
@example(3, 1, 4, True, 0)
def test_interaction_in_three_ways(count: int, vectors: int, dim: int, dense: bool, seed: int) -> None:
    """Promise: the kernel, what a device runs, and plain torch give the same dots and gradients, whatever the sizes."""
    torch.manual_seed(seed)
    vectors = vectors if dense else vectors + 1  # a single vector has no partner
    others = torch.randn(count, vectors, dim, dtype=torch.float64, requires_grad=True)
    first = torch.randn(count, dim, dtype=torch.float64, requires_grad=True) if dense else None
    one = others.detach()[:, :0] if first is None else first.detach()[:, None]
    found, wanted = interaction.interact(first, others), oracle.plain_interact(first, others)
    grad = torch.randn_like(found)
    trained = [others] if first is None else [first, others]
    ours, theirs = (torch.autograd.grad(out, trained, grad) for out in (found, wanted))
    device = interaction._interact_backward_with_torch(grad, one, others.detach())[0 if dense else 1 :]
    on_device = interaction._interact_with_torch(one, others.detach())
    for a, b in [
        (found, wanted),
        (on_device, wanted),
        *zip(ours, theirs),
        *zip((d.view_as(t) for d, t in zip(device, theirs)), theirs),
    ]:
        assert distance(a.detach().numpy(), b.detach().numpy()) <= CLOSE


def test_what_does_not_interact_is_refused_and_numbers_are_promoted() -> None:
    """Promise: no kernel reads past its input; double with float gives double, as anywhere in torch."""
    for wrong in [(5, 4), (1, 4), (2, 6)]:
        with pytest.raises(ValueError, match="do not interact"):
            interaction.interact(torch.ones(wrong), torch.ones(2, 3, 4))
    found = interaction.interact(torch.ones(2, 4, dtype=torch.float64), torch.ones(2, 3, 4))
    assert found.dtype == torch.float64 and found[0, 4:].tolist() == [4.0] * 6


def test_a_dlrm_without_pairs_is_refused() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        DenseArch(DLRMConfig(), sparse_features=1, dense_features=0)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 10),
    st.integers(0, 2**31 - 1),
)
@example([9, 1, 4], 2, 3, 4, 0)
def test_attention_in_three_ways(lengths: list[int], heads: int, width: int, block: int, seed: int) -> None:
    """Promise: the kernels in blocks of any size, what a device runs, and plain torch attend alike and pass back alike."""
    torch.manual_seed(seed)
    n, count = max(lengths), torch.tensor(lengths)
    bucket = torch.randint(0, relative_bias.TIME_BUCKETS + 1, (len(lengths), n, n), dtype=torch.int16)
    mixed = torch.randn(sum(lengths), 4 * heads * width, dtype=torch.float64, requires_grad=True)
    biases = [
        torch.randn(size, dtype=torch.float64, requires_grad=True) for size in (17, relative_bias.TIME_BUCKETS + 1)
    ]
    ways = attention.gated_attention, oracle.plain_gated_attention, attention._attention_with_torch
    with mock.patch.object(attention, "_BLOCK", block):
        outs = [way(mixed, *biases, bucket, count, heads, 0.1) for way in ways]
        grad = torch.randn_like(outs[0])
        found, wanted, on_device = ([out, *torch.autograd.grad(out, [mixed, *biases], grad)] for out in outs)
    for a, b, c in zip(found, wanted, on_device):
        assert distance(a.detach().numpy(), b.detach().numpy()) <= 1e-9
        assert distance(c.detach().numpy(), b.detach().numpy()) <= 1e-9


@pytest.mark.parametrize(
    ("tokens", "lengths", "places", "biases"),
    [(5, [2, 2], 3, 9), (5, [4, 1], 3, 9), (5, [6, -1], 6, 11), (5, [3, 2], 3, 4), (5, [5], 5, 9)],
)
def test_attention_that_does_not_fit(tokens: int, lengths: list[int], places: int, biases: int) -> None:
    """Promise: no kernel reads or writes past what it was given."""
    bucket = torch.zeros(2, places, places, dtype=torch.int16)
    by_place, by_time = torch.zeros(biases), torch.zeros(relative_bias.TIME_BUCKETS + 1)
    with pytest.raises(ValueError, match=r"does not fit times|a sample has 0 to"):
        attention.gated_attention(torch.zeros(tokens, 8), by_place, by_time, bucket, torch.tensor(lengths), 1, 0.1)


def test_kinds_of_floats_are_promoted() -> None:
    """Promise: a float64 model on float32 rows computes in float64."""
    bucket, lengths = torch.zeros(1, 2, 2, dtype=torch.int16), torch.tensor([2])
    time = torch.zeros(relative_bias.TIME_BUCKETS + 1, dtype=torch.float64)
    found = attention.gated_attention(torch.randn(2, 8), torch.zeros(3).double(), time, bucket, lengths, 1, 0.1)
    index = torch.zeros(2, 1, dtype=torch.long)
    cosines = sampled_softmax.indexed_cosines(torch.randn(2, 3).double(), torch.randn(1, 3), index)
    assert found.dtype == cosines.dtype == torch.float64
    with pytest.raises(ValueError, match="do not fit"):
        sampled_softmax.indexed_cosines(torch.randn(2, 3), torch.randn(1, 4), index)


def test_attention_without_gradients_keeps_no_slopes() -> None:
    """Promise: evaluation does not compute what only training needs, and comes to the same."""
    bucket, lengths = torch.zeros(1, 5, 5, dtype=torch.int16), torch.tensor([5])
    biases = torch.randn(9, requires_grad=True), torch.randn(relative_bias.TIME_BUCKETS + 1, requires_grad=True)
    mixed = torch.randn(5, 8)
    trained = attention.gated_attention(mixed, *biases, bucket, lengths, 1, 0.1)
    with torch.no_grad(), mock.patch.object(attention.kernels, "weigh", wraps=attention.kernels.weigh) as weigh:
        evaluated = attention.gated_attention(mixed, *biases, bucket, lengths, 1, 0.1)
    assert torch.equal(trained.detach(), evaluated) and weigh.call_args.args[-1].size == 0


def test_sigmoid_in_registers() -> None:
    """Promise: the kernels' sigmoid is good to 2 units in the last place, everywhere, and passes a NaN on."""
    x = np.concatenate([np.linspace(-87, 87, 100_001), [0, -0.0, 1e30, -1e30, np.inf, -np.inf, 1e-30, np.nan]])
    for dtype, close in ((np.float32, 3e-7), (np.float64, 1e-15)):
        given_ = x.astype(dtype)
        found = _sigmoids(given_)
        wanted = torch.from_numpy(given_).double().sigmoid().numpy()
        least = 1e-38 if dtype is np.float32 else 0.0
        away = np.abs(found - wanted)[:-1]
        assert (away <= close * wanted[:-1] + least).all(), given_[:-1][np.argmax(away - close * wanted[:-1])]
        assert np.isnan(given_[-1] * found[-1])


@numba.njit(fastmath={"contract"}, error_model="numpy")
def _sigmoids(x):  # type: ignore[no-untyped-def]
    out = np.empty_like(x)
    for i in range(x.shape[0]):
        out[i] = sigmoid(x[i])
    return out


def test_a_sample_interacts_alike_in_every_micro_batch() -> None:
    """Promise: a sample's dots do not depend on the samples beside it, to the bit."""
    first, others = torch.randn(12, 64), torch.randn(12, 26, 64)
    whole = interaction.interact(first, others)
    parts = [interaction.interact(f, o) for f, o in zip(first.split(5), others.split(5))]
    assert torch.equal(whole, torch.cat(parts))


def test_time_buckets_at_the_edges() -> None:
    """Promise: no gap, the largest gap and gaps next to a bucket's edge are in the bucket that the logarithm names."""
    gaps = [0, 1, 2, 3, 2**31, 2**62, 10**15, 10**16 + 1]
    least, most = -(2**63), 2**63 - 1
    for first, second in [*((5, 5 + gap) for gap in gaps), (least, 0), (least, most), (most, least), (most, 0)]:
        gap = second - first
        time = JaggedTensor(torch.tensor([first, second]), lengths=torch.tensor([2]))
        found = relative_bias.time_buckets(time, 1)
        assert torch.equal(found, oracle.plain_time_buckets(time, 1)), gap


@pytest.mark.parametrize("parameters", [0, 7])
def test_timed_loss_by_hand(parameters: int) -> None:
    """Promise: the stand-in's loss and its gradients are what plain torch makes of them."""
    torch.manual_seed(parameters)
    pooled = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    dense = torch.randn(parameters, dtype=torch.float64, requires_grad=True)
    target = torch.randn(5, dtype=torch.float64)
    loss, score = timed.Loss.apply(pooled, target, dense)
    wanted = (pooled.mean(1) - target).square().mean()
    if parameters:
        wanted = wanted + 0.5 * (dense - pooled.detach().mean()).square().mean()
    assert distance(loss.detach().numpy(), wanted.detach().numpy()) <= CLOSE
    assert torch.equal(score, pooled.mean(1)) and not score.requires_grad
    ours, theirs = (torch.autograd.grad(3 * x, [pooled, dense], allow_unused=True) for x in (loss, wanted))
    for a, b in zip(ours, theirs):
        assert b is None or distance(a.numpy(), b.numpy()) <= CLOSE


@pytest.mark.parametrize("times", [[1, 2], [1, 2, 3, 4, 5]])
def test_hstu_wants_one_time_more_than_items(times: list[int]) -> None:
    """Promise: a batch whose times do not fit its histories is refused; the kernel would read or write past the end."""
    lengths = torch.tensor([2, 2, 2 * samples.NEGATIVES, len(times)])
    values = torch.tensor([1, 2, 2, 3, *range(2 * samples.NEGATIVES), *times])
    with pytest.raises(ValueError, match="'time' has one entry more than 'history'"):
        samples.model("hstu", "float32")(Batch(KeyedJaggedTensor(samples.FEATURES["hstu"], values, lengths=lengths)))


@pytest.mark.parametrize(
    ("targets", "negatives", "said"),
    [
        ([2, 3], [3, 2], "one target per history position"),
        ([3, 2], [2, 3], "the same number of negatives"),
        ([3, 2], [0, 0], "at least one"),
        ([3, 2], [5, 3], "the same number of negatives"),
    ],
)
def test_hstu_pairs_targets_and_negatives_with_places(targets: list[int], negatives: list[int], said: str) -> None:
    """Promise: samples whose parts do not fit are refused, also where the totals do."""
    lengths = torch.tensor([3, 2, *targets, *negatives, 4, 3])
    kjt = KeyedJaggedTensor(samples.FEATURES["hstu"], torch.arange(int(lengths.sum())) % 7, lengths=lengths)
    with pytest.raises(ValueError, match=said):
        samples.model("hstu", "float32")(Batch(kjt))
