"""HSTU's attention bias: learned per distance in places, and per logarithmic bucket of the time between two events."""

from __future__ import annotations

import functools
import math

import numba
import numpy as np
import torch
from torch import Tensor

from nestpipe.data.jagged import JaggedTensor
from nestpipe.ops.lookup import lookup

TIME_BUCKETS = 128
_LOG_STEP = 0.301
_THRESHOLDS = np.array([math.ceil(math.exp(_LOG_STEP * k)) for k in range(1, TIME_BUCKETS + 1)], np.uint64)
"""A gap of _THRESHOLDS[k - 1] seconds or more is in bucket k or later: int(log(gap) / 0.301) without logarithms."""


def relative_bias(by_place: Tensor, by_time: Tensor, bucket: Tensor, lengths: Tensor) -> Tensor:
    """[B, n, n]: by_place[j - i] + by_time[bucket], 0 where j > i or i is past a sample's length.

    The middle of `by_place` is distance 0.  In torch operations: the attention kernels add the bias themselves, since
    as an operation of its own it would be most of a small HSTU's cost.
    """
    n, places = bucket.shape[1], by_place.shape[0]
    steps = torch.arange(n, device=bucket.device)
    distance = (steps[None, :] - steps[:, None] + (places - 1) // 2).clamp(0, places - 1)
    seen = (steps[None, :] <= steps[:, None])[None] & (steps[None, :, None] < lengths[:, None, None])
    return (lookup(by_place, distance) + lookup(by_time, bucket.long())) * seen


def time_buckets(time: JaggedTensor, longest: int) -> Tensor:
    """int16 [B, n, n]: for j <= i, the bucket of the time from event j to i + 1, the event that place i predicts."""
    if time.values().device.type != "cpu":
        return time_buckets_reference(time, longest)
    out = torch.zeros((time.lengths().numel(), longest, longest), dtype=torch.int16)
    _buckets(time.values().numpy(), time.offsets().numpy(), _THRESHOLDS, out.numpy())
    return out


def time_buckets_reference(time: JaggedTensor, longest: int) -> Tensor:
    """`time_buckets` in torch operations."""
    times = time.to_padded_dense(longest + 1)
    now, then = times[:, 1:, None], times[:, None, :-1]
    gap = torch.maximum(now, then) - torch.minimum(now, then)
    gap = torch.where(gap < 0, torch.iinfo(torch.int64).max, gap)  # beyond int64, and so beyond the last threshold
    thresholds = _thresholds_on(gap.device)
    steps = torch.arange(longest, device=gap.device)
    seen = (steps[None, :] <= steps[:, None])[None] & (steps[None, :, None] < time.lengths()[:, None, None] - 1)
    return (torch.bucketize(gap, thresholds, right=True) * seen).to(torch.int16)


@functools.cache
def _thresholds_on(device: torch.device) -> Tensor:
    """Made once: an upload makes the host wait."""
    return torch.from_numpy(_THRESHOLDS.astype(np.int64)).to(device)


@numba.njit(nogil=True, cache=True)
def _buckets(times, offsets, thresholds, out):  # type: ignore[no-untyped-def]
    for b in range(out.shape[0]):
        start = offsets[b]
        n = offsets[b + 1] - start - 1
        for i in range(n):
            now, bucket = times[start + i + 1], 0
            for j in range(i + 1):
                then = times[start + j]
                gap = np.uint64(max(now, then)) - np.uint64(
                    min(now, then)
                )  # unsigned: int64 cannot hold the largest gaps
                # Events are mostly in order, so a bucket is next to the last one.
                while bucket and gap < thresholds[bucket - 1]:
                    bucket -= 1
                while bucket < thresholds.shape[0] and gap >= thresholds[bucket]:
                    bucket += 1
                out[b, i, j] = bucket
