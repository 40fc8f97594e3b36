"""A stand-in for an accelerator: dense compute that takes time and no CPU.

Forward and backward take their time and the host sleeps; the loss and its gradients are cheap, deterministic functions of the
embeddings and of a dense parameter as large as asked for, so that everything else (routing, lookup, exchange, updates,
exactness) is real.  Figures made with it must say so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from nestpipe.data.batch import Batch
from nestpipe.nn.collections import EmbeddingBagCollection
from nestpipe.tables.config import TableDefaults


@dataclass(frozen=True)
class TimedConfig:
    """The [model] section of a timed recipe."""

    dim: int = 64
    forward_ms: float = 50.0
    """What the forward pass takes for `samples` samples; a micro-batch takes its share."""
    backward_ms: float = 100.0
    samples: int = 2048
    dense_parameters: int = 500_000
    """Parameters that are all-reduced."""

    def __post_init__(self) -> None:
        for name in ("dim", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, not {getattr(self, name)}")
        for name in ("forward_ms", "backward_ms", "dense_parameters"):
            if getattr(self, name) < 0:
                raise ValueError(f"model.{name} must be at least 0, not {getattr(self, name)}")


class Device:
    """An accelerator that is busy until some time.  Work that it is given starts when it has done what it was given before."""

    def __init__(self) -> None:
        self._free_at = 0.0
        self.inputs_at: float | None = None
        """When the rows of what is launched next arrived, by `time.perf_counter`.  None: just now.

        A host launches ahead of its accelerator, which begins when its inputs are there, even if the host was late to see it.
        """

    def launch(self, seconds: float) -> None:
        inputs_at = time.perf_counter() if self.inputs_at is None else self.inputs_at
        self._free_at = max(self._free_at, inputs_at) + seconds

    def wait(self) -> None:
        time.sleep(max(0.0, self._free_at - time.perf_counter()))


class Passes(torch.autograd.Function):
    """The identity.  The host waits for the backward pass alone: it launches both, one behind the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: Device, forward_s: float, backward_s: float) -> Tensor:
        ctx.device, ctx.backward_s = device, backward_s
        device.launch(forward_s)
        if not x.requires_grad:
            device.wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.device.launch(ctx.backward_s)
        ctx.device.wait()
        return grads[0], None, None, None


class Loss(torch.autograd.Function):
    """mean((score - target)^2) + mean((dense - mean(score))^2) / 2, where the mean of scores counts as given.

    By hand, since it stands for work of the accelerator: in plain torch it would take the host a dozen passes over its arguments.
    """

    @staticmethod
    def forward(ctx: Any, pooled: Tensor, target: Tensor, dense: Tensor) -> tuple[Tensor, Tensor]:
        score = pooled.mean(dim=1)
        apart, centre = score - target, score.mean()
        loss = apart.square().mean()
        if dense.numel():
            from_centre = dense - centre
            loss = loss + 0.5 * torch.dot(from_centre, from_centre) / dense.numel()
        ctx.save_for_backward(apart, centre, dense)
        ctx.pooled = pooled.shape
        ctx.mark_non_differentiable(score)
        return loss, score

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        apart, centre, dense = ctx.saved_tensors
        samples, width = ctx.pooled
        by_score = apart * (2 * grads[0] / (samples * width))
        by_dense = (dense - centre).mul_(grads[0] / max(1, dense.numel()))
        return by_score[:, None].expand(samples, width).contiguous(), None, by_dense


class Timed(nn.Module):
    """Returns a smooth loss of all embeddings and of the dense parameters, after a while."""

    off_host = True

    def __init__(self, config: TimedConfig, features: Sequence[str], tables: TableDefaults | None = None) -> None:
        super().__init__()
        tables = tables or TableDefaults()
        self.config = config
        self.sparse = EmbeddingBagCollection([tables.bag(f, config.dim, [f]) for f in features])
        self.dense = nn.Parameter(torch.zeros(config.dense_parameters))
        self.device = Device()

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        share = len(batch) / self.config.samples
        pooled = self.sparse(batch.sparse_features).values()
        seconds = (self.config.forward_ms * share / 1e3, self.config.backward_ms * share / 1e3)
        pooled = Passes.apply(pooled, self.device, *seconds)
        target = pooled.new_zeros(len(batch)) if batch.labels is None else batch.labels.to(pooled.dtype)
        loss, score = Loss.apply(pooled, target, self.dense)
        return loss, score
