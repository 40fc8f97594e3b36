"""The dense side of one worker: a replica of the model's parameters whose gradients lie in one flat buffer per dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nestpipe.comm.exchange import Exchange
from nestpipe.tables import kernels


class DenseReplica:
    """Gradients are views into flat buffers, so that one all-reduce moves them all.  A parameter no batch uses has gradient 0."""

    def __init__(self, parameters: Iterable[nn.Parameter], exchange: Exchange) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.exchange = exchange
        self._flat: list[Tensor] = []
        self._views: list[tuple[nn.Parameter, Tensor]] = []
        by_dtype: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for p in self.parameters:
            by_dtype.setdefault((p.dtype, p.device), []).append(p)
        for (dtype, device), members in by_dtype.items():
            flat = torch.zeros(sum(p.numel() for p in members), dtype=dtype, device=device)
            self._flat.append(flat)
            at = 0
            for p in members:
                self._views.append((p, flat[at : at + p.numel()].view_as(p)))
                at += p.numel()

    def clear(self) -> None:
        """Zeroes the gradients and makes sure that the parameters' `grad` are still ours."""
        for flat in self._flat:
            flat.zero_()
        for parameter, view in self._views:
            parameter.grad = view

    def reduce(self) -> None:
        """Sums the gradients of all workers.  Afterwards they are the same bits everywhere."""
        for parameter, view in self._views:
            if parameter.grad is None or parameter.grad.data_ptr() != view.data_ptr():
                raise RuntimeError(
                    "a parameter's .grad was dropped or replaced during the batch: leave zero_grad() and .grad to the pipeline"
                )
        for flat in self._flat:
            self.exchange.all_reduce(flat)

    def sum_of_squares(self) -> float:
        return float(sum(_sum_of_squares(flat) for flat in self._flat))

    def scale(self, factor: float) -> None:
        for flat in self._flat:
            flat.mul_(factor)


def _sum_of_squares(flat: Tensor) -> float:
    """In float64.  On the host in one pass, with no copy in float64."""
    if flat.device.type == "cpu" and flat.dtype in (torch.float32, torch.float64):
        return float(kernels.sum_of_squares(flat.numpy().reshape(1, -1)))
    return float(torch.sum(flat.double().square()))
