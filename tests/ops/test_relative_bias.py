"""HSTU's bias by place and time: the kernel beside the reference, and both beside the oracle."""

from __future__ import annotations

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import oracle
from comparing import FLOATS, check_close, with_gradients
from nestpipe.data.jagged import JaggedTensor
from nestpipe.ops.relative_bias import TIME_BUCKETS, relative_bias, time_buckets, time_buckets_reference


def jagged_times(lengths: list[int], spread: int, in_order: bool) -> JaggedTensor:
    """For each length the times of its events and of the one after them."""
    times = torch.randint(-(10**spread), 10**spread, (sum(lengths) + len(lengths),))
    parts = list(torch.split(times, [length + 1 for length in lengths]))
    values = torch.cat([torch.sort(p)[0] if in_order else p for p in parts]) if parts else times
    return JaggedTensor(values, lengths=torch.tensor([len(p) for p in parts if lengths], dtype=torch.int64))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 6), max_size=4), st.integers(0, 18), st.booleans(), FLOATS, st.integers(0, 2**31 - 1))
@example([], 3, True, torch.float32, 0)
@example([1], 3, True, torch.float32, 0)
def test_buckets_and_biases(lengths: list[int], spread: int, in_order: bool, dtype: torch.dtype, seed: int) -> None:
    """Promise: kernel, reference and oracle put a pair into one bucket; bias and gradients are the oracle's."""
    torch.manual_seed(seed)
    n, time = max(lengths, default=2), jagged_times(lengths, spread, in_order)
    bucket = time_buckets(time, n)
    assert bucket.dtype == torch.int16 and torch.equal(bucket, time_buckets_reference(time, n))
    assert torch.equal(bucket, oracle.plain_time_buckets(time, n) if lengths else bucket)
    biases = [torch.randn(size, dtype=dtype, requires_grad=True) for size in (13, TIME_BUCKETS + 1)]
    count, grad = torch.tensor(lengths, dtype=torch.int64), torch.randn(bucket.shape, dtype=dtype)
    ways = relative_bias, oracle.plain_relative_bias
    check_close(*(with_gradients(way(*biases, bucket, count), biases, grad) for way in ways))


def test_buckets_at_the_edges() -> None:
    """Promise: no gap, the largest gap and gaps next to a bucket's edge are in the bucket that the logarithm names."""
    gaps = [0, 1, 2, 3, 2**31, 2**62, 10**15, 10**16 + 1]
    least, most = -(2**63), 2**63 - 1
    for first, second in [*((5, 5 + gap) for gap in gaps), (least, 0), (least, most), (most, least), (most, 0)]:
        time = JaggedTensor(torch.tensor([first, second]), lengths=torch.tensor([2]))
        for found in (time_buckets(time, 1), time_buckets_reference(time, 1)):
            assert torch.equal(found, oracle.plain_time_buckets(time, 1)), second - first
