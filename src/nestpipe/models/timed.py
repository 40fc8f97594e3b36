"""A stand-in for an accelerator: dense compute that takes time and no CPU.

Forward and backward sleep; the loss and its gradients are cheap, deterministic functions of the embeddings and of a dense
parameter as large as asked for, so that everything else (routing, lookup, exchange, updates, exactness) is real.  Figures made
with it must say so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.data.batch import Batch
from nestpipe.embedding import EmbeddingBagCollection
from nestpipe.tables.config import TableDefaults


@dataclass(frozen=True)
class TimedConfig:
    """The [model] section of a timed recipe."""

    dim: int = 64
    forward_ms: float = 50.0
    """Sleep of the forward pass for `samples` samples; a micro-batch sleeps for its share."""
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


class Sleep(torch.autograd.Function):
    """The identity, after a while, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return grads[0], None, None


class Timed(nn.Module):
    """Returns a smooth loss of all embeddings and of the dense parameters, after sleeping."""

    def __init__(self, config: TimedConfig, features: Sequence[str], tables: TableDefaults | None = None) -> None:
        super().__init__()
        tables = tables or TableDefaults()
        self.config = config
        self.sparse = EmbeddingBagCollection([tables.bag(f, config.dim, [f]) for f in features])
        self.dense = nn.Parameter(torch.zeros(config.dense_parameters))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        share = len(batch) / self.config.samples
        pooled = self.sparse(batch.sparse_features).values()
        pooled = Sleep.apply(pooled, self.config.forward_ms * share / 1e3, self.config.backward_ms * share / 1e3)
        score = pooled.mean(dim=1)
        target = score.new_zeros(len(batch)) if batch.labels is None else batch.labels.to(score.dtype)
        loss = (score - target).square().mean()
        if self.config.dense_parameters:
            loss = loss + 0.5 * (self.dense - score.mean().detach()).square().mean()
        return loss, score.detach()
