"""Times of events, and what a pair of places weighs by the time between them: from event j to i + 1, which place i predicts.

Attention by tiles makes a tile's weights from the times themselves.  Operations on padded samples use the tensors here.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from nestpipe.data.jagged import JaggedTensor
from nestpipe.ops.lookup import lookup

TIME_BUCKETS = 128
LOG_STEP = 0.301
THRESHOLDS = np.array([math.ceil(math.exp(LOG_STEP * k)) for k in range(1, TIME_BUCKETS + 1)], np.uint64)
"""A gap of THRESHOLDS[k - 1] seconds or more is in bucket k or later: int(log(gap) / 0.301) without logarithms."""

BUCKETS, POWER, DECAY = 0, 1, 2
"""A pair's weight by time, from the seconds D between two events: a weight of D's bucket, a (1 + D)^-b, or a exp(-c D^b)."""
PARAMETERS = {BUCKETS: TIME_BUCKETS + 1, POWER: 2, DECAY: 3}


class EventTimes:
    """The times of a batch's histories, each with that of the event after it."""

    def __init__(self, time: JaggedTensor) -> None:
        self.time = time

    @property
    def samples(self) -> int:
        return self.time.lengths().numel()

    @functools.cached_property
    def lengths(self) -> Tensor:
        """Events of each history, without the one after it."""
        return self.time.lengths() - 1

    @functools.cached_property
    def starts(self) -> Tensor:
        """Where each history's tokens begin, and the end of the last."""
        return self.time.offsets() - torch.arange(self.samples + 1, device=self.time.offsets().device)

    @functools.cached_property
    def longest(self) -> int:
        return int(self.time.lengths_on_host().max()) - 1 if self.samples else 0

    @functools.cached_property
    def seen(self) -> Tensor:
        """bool [B, n, n]: i is a place of sample b, and j no later."""
        steps = torch.arange(self.longest, device=self.lengths.device)
        return (steps[None, :] <= steps[:, None])[None] & (steps[None, :, None] < self.lengths[:, None, None])

    @functools.cached_property
    def gaps(self) -> Tensor:
        """int64 [B, n, n]: for j <= i, the time from event j to i + 1, at most the largest int64."""
        times = self.time.to_padded_dense(self.longest + 1)
        now, then = times[:, 1:, None], times[:, None, :-1]
        gap = torch.maximum(now, then) - torch.minimum(now, then)
        return torch.where(gap < 0, torch.iinfo(torch.int64).max, gap)

    @functools.cached_property
    def buckets(self) -> Tensor:
        """int16 [B, n, n]: the gaps' buckets, 0 where a pair is not seen."""
        thresholds = thresholds_on(self.gaps.device)
        return (torch.bucketize(self.gaps, thresholds, right=True) * self.seen).to(torch.int16)

    def weights(self, kind: int, by_time: Tensor) -> Tensor:
        """[B, n, n]: what pairs weigh by time, 0 where they are not seen."""
        if kind == BUCKETS:
            found = lookup(by_time, self.buckets.long())
        else:
            gap = self.gaps.to(by_time.dtype)
            if kind == POWER:
                a, b = by_time.unbind()
                found = a * torch.exp(-b * torch.log(1 + gap))
            else:
                a, b, c = by_time.unbind()
                power = torch.exp(b * torch.log(gap.clamp_min(1)))  # whole seconds: none, or at least one
                found = a * torch.exp(-c * torch.where(gap > 0, power, 0))
        return torch.where(self.seen, found, 0)

    def place_weights(self, by_place: Tensor) -> Tensor:
        """[B, n, n]: by_place at the pairs' distances, 0 where they are not seen.  The middle of it is distance 0."""
        steps, places = torch.arange(self.longest, device=self.lengths.device), by_place.shape[0]
        distance = (steps[None, :] - steps[:, None] + (places - 1) // 2).clamp(0, places - 1)
        return lookup(by_place, distance) * self.seen


@functools.cache
def thresholds_on(device: torch.device) -> Tensor:
    """Made once: an upload makes the host wait."""
    return torch.from_numpy(THRESHOLDS.astype(np.int64)).to(device)
