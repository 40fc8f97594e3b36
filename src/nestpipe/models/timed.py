"""A stand-in for a model on an accelerator: dense compute that takes time but no CPU.

The host sleeps while forward and backward "run".  The loss and its gradients are cheap, deterministic functions of the
embeddings and of a dense parameter of any size.  Everything else is real: routing, lookup, exchange, updates,
exactness.  Figures made with this model must say so.
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
    """Embedding dimension."""
    forward_ms: float = 50.0
    """Time of the forward pass for `samples` samples.  A micro-batch takes its share."""
    backward_ms: float = 100.0
    """Time of the backward pass, as forward_ms."""
    samples: int = 2048
    """Samples that forward_ms and backward_ms are for."""
    dense_parameters: int = 500_000
    """Number of parameters to all-reduce."""

    def __post_init__(self) -> None:
        for name in ("dim", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, not {getattr(self, name)}")
        for name in ("forward_ms", "backward_ms", "dense_parameters"):
            if getattr(self, name) < 0:
                raise ValueError(f"model.{name} must be at least 0, not {getattr(self, name)}")


class Device:
    """An accelerator that does one launch after another, in order."""

    def __init__(self) -> None:
        self._free_at = 0.0
        self.inputs_at: float | None = None
        """When the rows of the next launch arrived, by `time.perf_counter`.  None: just now.

        A host launches ahead of its accelerator.  The accelerator begins when its inputs have arrived, even if the host
        notices late.
        """

    def launch(self, seconds: float) -> None:
        inputs_at = time.perf_counter() if self.inputs_at is None else self.inputs_at
        self._free_at = max(self._free_at, inputs_at) + seconds

    def wait(self) -> None:
        time.sleep(max(0.0, self._free_at - time.perf_counter()))


class Passes(torch.autograd.Function):
    """The identity.  The host launches both passes, one after the other, and waits only for the backward pass."""

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
    """mean((score - target)^2) + mean((dense - mean(score))^2) / 2, with the mean of scores as a constant.

    Written by hand, because it stands for work of the accelerator: plain torch would make a dozen passes over its
    arguments.
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
    """Returns a smooth loss of all embeddings and of the dense parameters, after the configured time."""

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
