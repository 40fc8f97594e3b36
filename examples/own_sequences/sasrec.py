"""A sequence model of your own that a recipe names: model.kind = "sasrec:SASRec".

    python make_log.py                                  # once: a log of events
    nestpipe train recipe.toml --workers 2
    nestpipe verify recipe.toml --workers 2 --steps 20  # is it bit for bit `serial`?

SASRec is a causal transformer over a user's history, with learned positions.  The loss is that of the built-in models,
so they can be compared: set model.kind = "hstu" or "sasrec" in the recipe.  The built-in SASRec normalises as the
original does and pads nothing; this one is an example of a class of your own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe import Batch, EmbeddingCollection, JaggedTensor, TableDefaults
from nestpipe.ops.sampled_softmax import sampled_softmax_loss


@dataclass(frozen=True)
class SASRecConfig:
    """The keys of [model]."""

    dim: int = 32
    """Embedding dimension."""
    blocks: int = 2
    """Attention blocks."""
    heads: int = 1
    """Attention heads of a block."""
    max_length: int = 100
    """Longest history.  data.max_length must not be larger."""
    dropout: float = 0.2
    """Share of the values that dropout zeroes while training."""
    temperature: float = 0.05
    """Divides the similarities before the softmax."""


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to what came in."""

    def __init__(self, config: SASRecConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.before_attention, self.before_feed_forward = nn.LayerNorm(config.dim), nn.LayerNorm(config.dim)
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)
        self.feed_forward = nn.Sequential(
            nn.Linear(config.dim, config.dim), nn.ReLU(), nn.Dropout(config.dropout), nn.Linear(config.dim, config.dim)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(2, (3 * self.heads, -1)).transpose(1, 2).chunk(3, dim=1)
        # Causal: what follows a history, padding included, changes nothing of it.
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + functional.dropout(self.out(mixed), self.dropout, self.training)
        return x + functional.dropout(self.feed_forward(self.before_feed_forward(x)), self.dropout, self.training)


class SASRec(nn.Module):
    """Trains on every position of a history; returns a query for each user's last position."""

    table = "item"  # an evaluation ranks the rows of this table

    def __init__(self, config: SASRecConfig, tables: TableDefaults) -> None:
        super().__init__()
        self.config = config
        self.sparse = EmbeddingCollection([tables.sequence(self.table, config.dim, ["history", "target", "negatives"])])
        self.places = nn.Parameter(torch.empty(config.max_length, config.dim).normal_(0, 0.02))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.dim)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        found = self.sparse.unique_rows(batch.sparse_features)  # each row once, and an index: negatives repeat a lot
        history, rows = found["history"], found["history"].rows
        jagged = JaggedTensor(rows[history.index.long()], lengths=history.lengths)
        user, place = jagged.places()
        x = jagged.values() * self.config.dim**0.5 + self.places[place]
        x = functional.dropout(x, self.config.dropout, self.training)
        x = JaggedTensor(x, lengths=history.lengths).to_padded_dense()  # [users, longest, dim]
        for block in self.blocks:
            x = block(x)
        queries = self.norm(x)[user, place]  # [all positions, dim]
        last = functional.normalize(queries.detach()[jagged.offsets()[1:] - 1], dim=1)
        if not self.training:
            return queries.new_zeros(()), last
        negatives = found["negatives"].index.view(len(queries), -1)
        loss = sampled_softmax_loss(queries, rows, found["target"].index, negatives, self.config.temperature)
        return loss, last

    def item_vectors(self, rows: Tensor) -> Tensor:
        """What queries are compared with: the loss compares directions, so lengths do not count."""
        return functional.normalize(rows, dim=1)
