"""HSTU's attention bias: learned per distance in places and per logarithmic bucket of the time between two events.

Gathering a bias for every pair of a batch and summing its gradient back is most of a small HSTU's cost in plain torch (a dense
embedding backward of millions of pairs into 129 numbers), so both are kernels here.  Only pairs that look back are touched.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from nestpipe.data.jagged import JaggedTensor

TIME_BUCKETS = 128
_LOG_STEP = 0.301
_THRESHOLDS = np.array(
    [min(math.ceil(math.exp(_LOG_STEP * k)), 2**63 - 1) for k in range(1, TIME_BUCKETS + 1)], np.uint64
)
"""A gap of at least _THRESHOLDS[k-1] seconds is in bucket k or later: int(log(gap) / 0.301) without a logarithm per pair."""


@numba.njit(nogil=True, cache=True)
def _buckets(times, offsets, thresholds, out):  # type: ignore[no-untyped-def]
    for b in range(out.shape[0]):
        start = offsets[b]
        n = offsets[b + 1] - start - 1
        for i in range(n):
            now, bucket = times[start + i + 1], 0
            for j in range(i + 1):
                then = times[start + j]
                gap = np.uint64(max(now, then)) - np.uint64(min(now, then))  # of any two: no int64 holds the largest
                # Events are mostly in order, so one bucket is next to the last one.
                while bucket and gap < thresholds[bucket - 1]:
                    bucket -= 1
                while bucket < thresholds.shape[0] and gap >= thresholds[bucket]:
                    bucket += 1
                out[b, i, j] = bucket


def time_buckets(time: JaggedTensor, longest: int) -> Tensor:
    """int16 [B, n, n]: the bucket of the time from event j to event i + 1, which is what place i predicts, for j <= i."""
    out = torch.zeros((time.lengths().numel(), longest, longest), dtype=torch.int16)
    _buckets(time.values().cpu().numpy(), time.offsets().cpu().numpy(), _THRESHOLDS, out.numpy())
    return out.to(time.values().device)


@numba.njit(nogil=True, cache=True)
def _bias(place, time, bucket, lengths, out):  # type: ignore[no-untyped-def]
    centre = (place.shape[0] - 1) // 2
    for b in range(bucket.shape[0]):
        for i in range(lengths[b]):
            for j in range(i + 1):
                out[b, i, j] = place[centre + j - i] + time[bucket[b, i, j]]


@numba.njit(nogil=True, cache=True)
def _bias_backward(grad, bucket, lengths, grad_place, grad_time):  # type: ignore[no-untyped-def]
    centre = (grad_place.shape[0] - 1) // 2
    for b in range(bucket.shape[0]):
        for i in range(lengths[b]):
            for j in range(i + 1):
                grad_place[centre + j - i] += grad[b, i, j]
                grad_time[bucket[b, i, j]] += grad[b, i, j]


class RelativeBias(torch.autograd.Function):
    """[B, n, n]: place[j - i] + time[bucket], 0 where j > i or past a sample's length."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, time: Tensor, bucket: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(bucket, lengths)
        ctx.sizes = place.shape[0], time.shape[0]
        if place.device.type == "cpu":
            out = torch.zeros(bucket.shape, dtype=place.dtype)
            _bias(place.numpy(), time.numpy(), bucket.numpy(), lengths.numpy(), out.numpy())
            return out
        return _bias_with_torch(place, time, bucket, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        bucket, lengths = ctx.saved_tensors
        grad = grads[0].contiguous()
        # float64 sums: millions of terms go into a hundred numbers
        grad_place = torch.zeros(ctx.sizes[0], dtype=torch.float64, device=grad.device)
        grad_time = torch.zeros(ctx.sizes[1], dtype=torch.float64, device=grad.device)
        if grad.device.type == "cpu":
            _bias_backward(grad.numpy(), bucket.numpy(), lengths.numpy(), grad_place.numpy(), grad_time.numpy())
        else:
            _bias_backward_with_torch(grad, bucket, lengths, grad_place, grad_time)
        return grad_place.to(grad.dtype), grad_time.to(grad.dtype), None, None


def _bias_with_torch(place: Tensor, time: Tensor, bucket: Tensor, lengths: Tensor) -> Tensor:
    distance, seen = _device_pairs(bucket, lengths, place.shape[0])
    return (place[distance] + time[bucket.long()]) * seen


def _bias_backward_with_torch(
    grad: Tensor, bucket: Tensor, lengths: Tensor, grad_place: Tensor, grad_time: Tensor
) -> None:
    distance, seen = _device_pairs(bucket, lengths, grad_place.shape[0])
    flat = (grad * seen).double()
    grad_place.index_add_(0, distance.expand_as(bucket).flatten(), flat.flatten())
    grad_time.index_add_(0, bucket.long().flatten(), flat.flatten())


def _device_pairs(bucket: Tensor, lengths: Tensor, places: int) -> tuple[Tensor, Tensor]:
    n = bucket.shape[1]
    steps = torch.arange(n, device=bucket.device)
    distance = (steps[None, :] - steps[:, None] + (places - 1) // 2).clamp(0, places - 1)
    seen = (steps[None, :] <= steps[:, None])[None] & (steps[None, :, None] < lengths[:, None, None])
    return distance, seen


def relative_bias(place: Tensor, time: Tensor, bucket: Tensor, lengths: Tensor) -> Tensor:
    result: Tensor = RelativeBias.apply(place, time, bucket, lengths)
    return result
