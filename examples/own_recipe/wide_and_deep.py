"""A model of your own that a recipe names: model.kind = "wide_and_deep:WideAndDeep".

    python make_log.py                                  # once: the log
    nestpipe recipe wide_and_deep:WideAndDeep           # its keys
    nestpipe train recipe.toml --workers 2
    nestpipe verify recipe.toml --workers 2 --steps 50  # is it bit for bit `serial`?

The wide part is a logistic regression: one number for each id.  The deep part is an MLP over embeddings and dense inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe import Batch, EmbeddingBagCollection, TableDefaults


@dataclass(frozen=True)
class WideAndDeepConfig:
    """The keys of [model]: a field for each, with its default, and its help below it."""

    dim: int = 16
    """Embedding dimension of the deep part."""
    hidden: tuple[int, ...] = (32, 16)
    """Hidden layers of the deep part."""

    def __post_init__(self) -> None:
        # A ValueError becomes one line on the terminal, so name the key.
        if self.dim < 1:
            raise ValueError(f"model.dim must be at least 1, not {self.dim}")


class WideAndDeep(nn.Module):
    """Will it be clicked?  The recipe gives the constructor what it names here."""

    def __init__(
        self, config: WideAndDeepConfig, features: Sequence[str], dense_features: int, tables: TableDefaults
    ) -> None:
        super().__init__()
        # `tables` makes table configs with what the recipe's [tables] says: dtype, first values, eviction.
        self.wide = EmbeddingBagCollection([tables.bag(f"{f}_wide", 1, [f]) for f in features])
        self.deep = EmbeddingBagCollection([tables.bag(f, config.dim, [f], pooling="mean") for f in features])
        widths = [config.dim * len(features) + dense_features, *config.hidden]
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
        self.mlp = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The mean loss, and a logit for each sample: from these come the held-out AUC and log loss."""
        wide = self.wide(batch.sparse_features).values().sum(dim=1)
        inputs = [self.deep(batch.sparse_features).values()]
        if batch.dense is not None:
            inputs.append(batch.dense)
        logits = wide + self.mlp(torch.cat(inputs, dim=1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, batch.labels), logits.detach()
