"""Kernels of the models: each against the same in plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import oracle
import samples
from nestpipe import Batch, KeyedJaggedTensor
from nestpipe.data.jagged import JaggedTensor
from nestpipe.models import interaction, relative_bias, sampled_softmax
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
@given(st.integers(0, 5), st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**31 - 1))
def test_indexed_dots_in_three_ways(queries: int, each: int, dim: int, seed: int) -> None:
    """Promise: the kernel, what a device runs, and plain torch give the same dots and the same gradients."""
    torch.manual_seed(seed)
    q = torch.randn(queries, dim, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(4, dim, dtype=torch.float64, requires_grad=True)
    index = torch.randint(0, 4, (queries, each), dtype=torch.int32)
    found, wanted = sampled_softmax.indexed_dots(q, rows, index), oracle.plain_indexed_dots(q, rows, index)
    on_device = sampled_softmax._dots_with_torch(q, rows, index)
    grad = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad(out, [q, rows], grad) for out in (found, wanted))
    device = sampled_softmax._dots_backward_with_torch(grad, q.detach(), rows.detach(), index)
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


def test_a_sample_interacts_alike_in_every_micro_batch() -> None:
    """Promise: a sample's dots do not depend on the samples beside it, to the bit."""
    first, others = torch.randn(12, 64), torch.randn(12, 26, 64)
    whole = interaction.interact(first, others)
    parts = [interaction.interact(f, o) for f, o in zip(first.split(5), others.split(5))]
    assert torch.equal(whole, torch.cat(parts))


def test_time_buckets_at_the_edges() -> None:
    """Promise: no gap, the largest gap and gaps next to a bucket's edge are in the bucket that the logarithm names."""
    gaps = [0, 1, 2, 3, 2**31, 2**62, 10**15, 10**16 + 1]
    for gap in gaps:
        time = JaggedTensor(torch.tensor([5, 5 + gap]), lengths=torch.tensor([2]))
        found = relative_bias.time_buckets(time, 1)
        assert torch.equal(found, oracle.plain_time_buckets(time, 1)), gap


@pytest.mark.parametrize("times", [[1, 2], [1, 2, 3, 4, 5]])
def test_hstu_wants_one_time_more_than_items(times: list[int]) -> None:
    """Promise: a batch whose times do not fit its histories is refused; the kernel would read or write past the end."""
    lengths = torch.tensor([2, 2, 2 * samples.NEGATIVES, len(times)])
    values = torch.tensor([1, 2, 2, 3, *range(2 * samples.NEGATIVES), *times])
    with pytest.raises(ValueError, match="'time' has one entry more than 'history'"):
        samples.model("hstu", "float32")(Batch(KeyedJaggedTensor(samples.FEATURES["hstu"], values, lengths=lengths)))
