"""The dense side of one worker: a replica of the model's parameters whose gradients lie in one flat buffer per dtype.

The buffer is divided into buckets, last parameters first, because a backward pass finishes those first: a bucket can be summed
over the workers while the rest is still being computed.  What is in a bucket depends on the model alone, since with more than two
workers the division decides in which order numbers are added.

Where gradients are made after the backward passes, bucket by bucket, a weight may lie in several, some of its rows in each, and
their order is ours: those that are there already come first, then the largest.  So the link is fed early and evenly, and what is
left to send at the end is little.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nestpipe.comm.exchange import Exchange
from nestpipe.tables import kernels

BUCKETS, LATE_BUCKETS = 4, 8
"""As many as this where gradients are large enough; more of them where they are made one by one."""
LEAST_BYTES, MOST_BYTES = 1 << 18, 25 << 20
"""Of a bucket."""
ROWS_AT_ONCE = 16
"""A weight is divided after so many rows, or a multiple: matrix products like it."""
IN_FLIGHT = 2
"""Sums over the workers on their way at a time: while one waits for an answer, another has the link."""


@dataclass(frozen=True)
class Part:
    """Some rows of a parameter."""

    parameter: nn.Parameter
    rows: slice
    """slice(None) where it may not be divided."""


@dataclass(frozen=True)
class Bucket:
    """Gradients that are summed together, and whose they are."""

    flat: Tensor
    parts: list[Part]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [part.parameter for part in self.parts]

    @property
    def nbytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()


class DenseReplica:
    """Gradients are views into flat buffers.  A parameter that no batch uses has gradient 0."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], exchange: Exchange, late: Collection[nn.Parameter] = ()
    ) -> None:
        """`late`: those whose gradients are made after the backward passes."""
        self.parameters = [p for p in parameters if p.requires_grad]
        self.exchange = exchange
        self._flat: list[Tensor] = []
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        self._sums: deque[Callable[[], None]] = deque()
        """What waits for sums that are on their way, in their order."""
        self.buckets: list[Bucket] = []
        late_ones = set(late)
        by_dtype: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for p in reversed(self.parameters):
            by_dtype.setdefault((p.dtype, p.device), []).append(p)
        total = sum(p.numel() * p.element_size() for p in self.parameters)
        enough = min(MOST_BYTES, max(LEAST_BYTES, total // (LATE_BUCKETS if late_ones else BUCKETS)))
        for (dtype, device), members in by_dtype.items():
            flat = torch.zeros(sum(p.numel() for p in members), dtype=dtype, device=device)
            self._flat.append(flat)
            at = 0
            for p in members:
                self._views.append((p, flat[at : at + p.numel()].view_as(p)))
                at += p.numel()
            self.buckets += _divide(flat, members, late_ones, enough)
        if late_ones:
            self.buckets.sort(key=lambda b: (not late_ones.isdisjoint(b.parameters), -b.nbytes))

    def clear(self) -> None:
        """Zeroes the gradients and makes sure that the parameters' `grad` are still ours."""
        self._sums.clear()  # of a batch that failed
        for flat in self._flat:
            flat.zero_()
        for parameter, view in self._views:
            parameter.grad = view

    def finished(self) -> None:
        """After the last backward pass of a batch: the gradients are where they were put."""
        for parameter, view in self._views:
            if parameter.grad is None or parameter.grad.data_ptr() != view.data_ptr():
                raise RuntimeError(
                    "a parameter's .grad was dropped or replaced during the batch: leave zero_grad() and .grad to the pipeline"
                )

    def reduce(self, bucket: int) -> None:
        """Begins to sum the gradients of all workers.  After the last bucket's all are summed, the same bits everywhere."""
        if not self.buckets:
            return
        self._sums.append(self.exchange.begin_all_reduce(self.buckets[bucket].flat))
        left = IN_FLIGHT - 1 if bucket < len(self.buckets) - 1 else 0
        while len(self._sums) > left:
            self._sums.popleft()()

    def sum_of_squares(self) -> float:
        return float(sum(_sum_of_squares(flat) for flat in self._flat))

    def scale(self, factor: float) -> None:
        for flat in self._flat:
            flat.mul_(factor)


def _divide(flat: Tensor, members: list[nn.Parameter], late: set[nn.Parameter], enough: int) -> list[Bucket]:
    """Buckets of at least `enough` bytes, but for the last; only weights in `late` may lie in several."""
    buckets: list[Bucket] = []
    parts: list[Part] = []
    at = begin = 0
    for parameter in members:
        divisible = parameter in late and parameter.dim() == 2
        for rows in _runs_of_rows(len(parameter)) if divisible else [slice(None)]:
            if parts and parts[-1].parameter is parameter:
                parts[-1] = Part(parameter, slice(parts[-1].rows.start, rows.stop))
            else:
                parts.append(Part(parameter, rows))
            at += parameter.detach()[rows].numel() if divisible else parameter.numel()
            if (at - begin) * flat.element_size() >= enough or at == len(flat):
                buckets.append(Bucket(flat[begin:at], parts))
                begin, parts = at, []
    return buckets


def _runs_of_rows(count: int) -> list[slice]:
    return [slice(first, min(first + ROWS_AT_ONCE, count)) for first in range(0, count, ROWS_AT_ONCE)]


def _sum_of_squares(flat: Tensor) -> float:
    """In float64.  On the host in one pass, with no copy in float64."""
    if flat.device.type == "cpu" and flat.dtype in (torch.float32, torch.float64):
        return float(kernels.sum_of_squares(flat.numpy().reshape(1, -1)))
    return float(torch.sum(flat.double().square()))
