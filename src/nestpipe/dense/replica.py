"""The dense side of one worker: a replica of the model's parameters whose gradients lie in one flat buffer per dtype.

The buffer is divided into buckets, last parameters first, because a backward pass finishes those first.  A bucket can
be summed over the workers while the rest is still being computed.  The model alone decides which bucket a parameter is
in: with more than two workers, the division determines in which order numbers are added.

Deferred weight gradients are made bucket by bucket, in any order we like.  Buckets without deferred gradients come
first, then the largest ones.  So the link is busy early, and little is left to send at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from nestpipe.ops import rows
from nestpipe.ops.host import has_kernels

BUCKETS = 4
"""How many buckets large gradients get."""
LEAST_BYTES, MOST_BYTES = 1 << 18, 25 << 20
"""The size of a bucket.  A parameter is never divided."""


class DenseExchange(Protocol):
    """How dense gradients are summed over the workers."""

    def all_reduce(self, tensor: Tensor) -> None: ...


@dataclass(frozen=True)
class Bucket:
    """Gradients that are summed together, and their parameters."""

    flat: Tensor
    parameters: list[nn.Parameter]

    @property
    def nbytes(self) -> int:
        return self.flat.numel() * self.flat.element_size()


class DenseReplica:
    """Gradients are views into flat buffers.  A parameter that no batch uses has gradient 0."""

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        exchange: DenseExchange,
        deferred: Collection[nn.Parameter] = (),
    ) -> None:
        """`named`: all parameters of the model; `deferred`: those with deferred gradients."""
        self._trains = {p: (name, p.requires_grad) for name, p in named}
        self.parameters = [p for p, (_, trains) in self._trains.items() if trains]
        made_later = set(deferred)
        self.exchange: DenseExchange = exchange
        self._flat: list[Tensor] = []
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        self.buckets: list[Bucket] = []
        by_dtype: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for p in reversed(self.parameters):
            by_dtype.setdefault((p.dtype, p.device), []).append(p)
        total = sum(p.numel() * p.element_size() for p in self.parameters)
        enough = min(MOST_BYTES, max(LEAST_BYTES, total // BUCKETS))
        for (dtype, device), members in by_dtype.items():
            flat = torch.zeros(sum(p.numel() for p in members), dtype=dtype, device=device)
            self._flat.append(flat)
            at = begin = 0
            inside: list[nn.Parameter] = []
            for p in members:
                self._views.append((p, flat[at : at + p.numel()].view_as(p)))
                at += p.numel()
                inside.append(p)
                if (at - begin) * flat.element_size() >= enough or at == len(flat):
                    self.buckets.append(Bucket(flat[begin:at], inside))
                    begin, inside = at, []
        if made_later:
            self.buckets.sort(key=lambda b: (not made_later.isdisjoint(b.parameters), -b.nbytes))

    def clear(self) -> None:
        """Zeroes the gradients and sets every parameter's `.grad` to its view."""
        for flat in self._flat:
            flat.zero_()
        for parameter, view in self._views:
            parameter.grad = view

    def finished(self) -> None:
        """After a batch's last backward pass: RuntimeError if the user changed `requires_grad` or `.grad`."""
        for parameter, (name, trained) in self._trains.items():
            if parameter.requires_grad != trained:
                raise RuntimeError(
                    f"requires_grad of {name} was {trained} when the pipeline was made and has changed: set it before. To "
                    "train a part of the model later, or no longer, use an optimizer group with a learning rate of 0"
                )
        for parameter, view in self._views:
            if parameter.grad is None or parameter.grad.data_ptr() != view.data_ptr():
                raise RuntimeError(
                    "a parameter's .grad was dropped or replaced during the batch: leave zero_grad() and .grad to the pipeline"
                )

    def check_owned(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises ValueError if the optimizer has a parameter that is not the model's: its gradient is never summed."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self._trains:
                    raise ValueError(
                        f"dense_optimizer has a parameter of shape {list(parameter.shape)} that the model did not have "
                        "when the pipeline was made: make it part of the model before that, or leave it out of the optimizer"
                    )

    def reduce(self, bucket: int) -> None:
        """Sums a bucket's gradients over all workers.  Every worker ends with the same bits."""
        if self.buckets:
            self.exchange.all_reduce(self.buckets[bucket].flat)

    def sums_of_squares(self) -> list[float | Tensor]:
        """Of the gradients of each dtype, in float64.  On a device tensors, so that nobody waits."""
        return [_sum_of_squares(flat) for flat in self._flat]

    def scale(self, factor: float) -> None:
        for flat in self._flat:
            flat.mul_(factor)


def _sum_of_squares(flat: Tensor) -> float | Tensor:
    if has_kernels(flat):  # in one pass and without a float64 copy
        return rows.sum_of_squares(flat.numpy().reshape(1, -1))
    return rows.sum_of_squares(flat)
