"""HSTU for next-item prediction: pointwise gated attention over a user's history, trained with sampled softmax.

One block, on the tokens x [T, d] of all histories, one after the other:  u, v, q, k = split(silu(W norm(x))); a =
(silu(q k' + bias) / N, causal, within a history) v;  x + W_o dropout(u * norm(a)).  The attention has no softmax, the
block no feed-forward part.  `bias` is learned per distance in places and per logarithmic bucket of the time between two
events.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.data.jagged import JaggedTensor
from nestpipe.models.next_item import NextItemConfig, NextItemModel
from nestpipe.nn.deferred import DeferredLinear
from nestpipe.ops.attention import gated_attention
from nestpipe.ops.relative_bias import TIME_BUCKETS, time_buckets
from nestpipe.tables.config import TableDefaults


@dataclass(frozen=True)
class HSTUConfig(NextItemConfig):
    """The [model] section of an HSTU recipe."""

    head_dim: int | None = None
    """Per head, for queries, keys, values and gates.  None: dim / heads."""


class Block(nn.Module):
    """One HSTU block, on tokens without padding."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.max_length = config.max_length
        inner = self.heads * (config.head_dim or config.dim // config.heads)
        self.uvqk = nn.utils.skip_init(DeferredLinear, config.dim, 4 * inner, bias=False)
        with torch.no_grad():
            self.uvqk.weight.copy_(torch.empty(config.dim, 4 * inner).normal_(0, 0.02).t())
        self.out = DeferredLinear(inner, config.dim)
        nn.init.xavier_uniform_(self.out.weight)
        self.dropout = config.dropout
        self.place_bias = nn.Parameter(torch.empty(2 * config.max_length - 1).normal_(0, 0.02))
        self.time_bias = nn.Parameter(torch.empty(TIME_BUCKETS + 1).normal_(0, 0.02))

    def forward(self, x: Tensor, bucket: Tensor, lengths: Tensor) -> Tensor:
        mixed = self.uvqk(functional.layer_norm(x, x.shape[1:], eps=1e-6))
        gated = gated_attention(
            mixed, self.place_bias, self.time_bias, bucket, lengths, self.heads, 1 / self.max_length
        )
        return x + self.out(functional.dropout(gated, self.dropout, self.training))


class HSTU(NextItemModel):
    def __init__(self, config: HSTUConfig, tables: TableDefaults | None = None) -> None:
        super().__init__(config, tables)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))

    def history_flops(self) -> tuple[float, float, float]:
        """(a, b, c): a forward pass over a history of n tokens takes about a + b n + c n^2 operations, negatives left out."""
        config = self.config
        inner = self.blocks[0].out.in_features
        linear = 2 * config.dim * 4 * inner + 2 * inner * config.dim
        return 0.0, float(config.blocks * linear), float(config.blocks * 2 * inner)

    def encode(self, x: Tensor, history: JaggedTensor, time: JaggedTensor) -> Tensor:
        bucket = time_buckets(time, int(history.lengths_on_host().max()))
        for block in self.blocks:
            x = block(x, bucket, history.lengths())
        return x
