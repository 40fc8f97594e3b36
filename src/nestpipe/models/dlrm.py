"""DLRM as published: bottom MLP over dense features, one embedding per sparse feature, all pairwise dots, top MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn import functional

from nestpipe.data.batch import Batch
from nestpipe.nn.collections import EmbeddingBagCollection
from nestpipe.nn.mlp import mlp
from nestpipe.ops.interaction import interact
from nestpipe.tables.config import TableDefaults


@dataclass(frozen=True)
class DLRMConfig:
    """The [model] section of a DLRM recipe."""

    dim: int = 16
    """Embedding dimension, and the output of the bottom MLP."""
    bottom: list[int] = field(default_factory=lambda: [64, 32])
    """Hidden layers of the bottom MLP."""
    top: list[int] = field(default_factory=lambda: [64, 32])
    """Hidden layers of the top MLP, which ends in one logit."""
    pooling: str = "sum"
    """How a multi-hot feature is pooled: "sum" or "mean"."""

    def __post_init__(self) -> None:
        if self.dim < 1:
            raise ValueError(f"model.dim must be at least 1, not {self.dim}")
        for name, sizes in (("bottom", self.bottom), ("top", self.top)):
            if any(size < 1 for size in sizes):
                raise ValueError(f"model.{name} must hold layer sizes of at least 1, not {sizes}")
        if self.pooling not in ("sum", "mean"):
            raise ValueError(f"model.pooling must be 'sum' or 'mean', not {self.pooling!r}")


class DenseArch(nn.Module):
    """All of DLRM but the tables: dense features [B, n] and pooled embeddings [B, F, dim] to a logit [B]."""

    def __init__(self, config: DLRMConfig, sparse_features: int, dense_features: int) -> None:
        super().__init__()
        self.bottom = mlp([dense_features, *config.bottom, config.dim], last_relu=True) if dense_features else None
        vectors = sparse_features + (1 if dense_features else 0)
        if vectors < 2:
            raise ValueError("one sparse feature and no dense one make no pairs for DLRM's interaction: add a feature")
        pairs = vectors * (vectors - 1) // 2
        self.top = mlp([pairs + (config.dim if dense_features else 0), *config.top, 1], last_relu=False)

    def forward(self, dense: Tensor | None, embeddings: Tensor) -> Tensor:
        if self.bottom is None or dense is None:
            return self.top(interact(None, embeddings)).squeeze(1)
        return self.top(interact(self.bottom(dense), embeddings)).squeeze(1)


class DLRM(nn.Module):
    """Click prediction.  Returns the mean log loss and the logits.  One table per sparse feature, named after it."""

    def __init__(
        self, config: DLRMConfig, features: Sequence[str], dense_features: int, tables: TableDefaults | None = None
    ) -> None:
        super().__init__()
        tables = tables or TableDefaults()
        self.dim = config.dim
        self.sparse = EmbeddingBagCollection([tables.bag(f, config.dim, [f], config.pooling) for f in features])
        self.dense = DenseArch(config, len(features), dense_features)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        if batch.labels is None and self.training:
            raise ValueError("DLRM needs batch.labels")
        pooled = self.sparse(batch.sparse_features).values().to(next(self.dense.parameters()).dtype)
        logits = self.dense(batch.dense, pooled.view(pooled.shape[0], -1, self.dim))
        if batch.labels is None:  # only scores are wanted
            return logits.new_zeros(()), logits.detach()
        return functional.binary_cross_entropy_with_logits(logits, batch.labels.to(logits.dtype)), logits.detach()
