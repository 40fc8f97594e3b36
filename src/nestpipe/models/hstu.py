"""HSTU: pointwise gated attention over a user's history, for next-item prediction and for ranking candidates.

One block, on the tokens x [T, d] of all histories, one after the other:  u, v, q, k = split(silu(W norm(x))); a =
(silu(q k' + bias) / N, causal, within a history) v;  x + W_o dropout(u * norm(a)).  The attention has no softmax, the
block no feed-forward part.  `bias` is learned per distance in places and per logarithmic bucket of the time between two
events.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nestpipe.data.jagged import JaggedTensor
from nestpipe.models.flops import Cost, matrix_weights
from nestpipe.models.next_item import NextItemConfig, NextItemModel
from nestpipe.models.ranking import RankingModel
from nestpipe.nn.deferred import DeferredLinear
from nestpipe.ops.attention import Attention, gated_attention
from nestpipe.ops.candidate_attention import ranking_attention
from nestpipe.ops.dropout import dropout
from nestpipe.ops.event_times import TIME_BUCKETS, EventTimes
from nestpipe.ops.gating import gated_norm, split_silu
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
        self.head_dim = config.head_dim or config.dim // config.heads
        inner = self.heads * self.head_dim
        self.uvqk = nn.utils.skip_init(DeferredLinear, config.dim, 4 * inner, bias=False)
        with torch.no_grad():
            self.uvqk.weight.copy_(torch.empty(config.dim, 4 * inner).normal_(0, 0.02).t())
        self.out = DeferredLinear(inner, config.dim)
        nn.init.xavier_uniform_(self.out.weight)
        self.dropout = config.dropout
        self.place_bias = nn.Parameter(torch.empty(2 * config.places - 1).normal_(0, 0.02))
        self.time_bias = nn.Parameter(torch.empty(TIME_BUCKETS + 1).normal_(0, 0.02))

    def forward(self, x: Tensor, events: EventTimes, candidates: JaggedTensor | None = None) -> Tensor:
        """`candidates`: the last tokens of x are those, request by request; they look at a history and at themselves."""
        mixed = self.uvqk(gated_norm(x, None, "layer"))
        biases = self.place_bias, self.time_bias
        if candidates is None:
            gated = gated_attention(mixed, *biases, events, self.heads, 1 / self.max_length)
        else:
            u, v, q, k = split_silu(mixed, [mixed.shape[1] // 4] * 4)
            attention = Attention(self.heads, 1 / self.max_length)
            gated = gated_norm(ranking_attention(q, k, v, *biases, events, candidates, attention), u, "layer")
        return x + self.out(dropout(gated, self.dropout, self.training))


class HSTU(NextItemModel):
    """Tokens through HSTU blocks, one after another."""

    def __init__(self, config: HSTUConfig, tables: TableDefaults | None = None) -> None:
        super().__init__(config, tables)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))

    def encode(self, x: Tensor, history: JaggedTensor, time: JaggedTensor) -> Tensor:
        events = EventTimes(time)
        for block in self.blocks:
            x = block(x, events)
        return x

    def cost(self) -> Cost:
        return _cost(self.config, self.blocks)


class HSTURanking(RankingModel):
    """History tokens and candidates through HSTU blocks, one after another."""

    def __init__(self, config: HSTUConfig, actions: Sequence[str], tables: TableDefaults | None = None) -> None:
        super().__init__(config, actions, tables)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))

    def cost(self) -> Cost:
        return _cost(self.config, self.blocks)


def _cost(config: NextItemConfig, blocks: nn.ModuleList) -> Cost:
    """Of a pair: its score, and its weight times the value."""
    width = config.heads * blocks[0].head_dim
    return Cost(matrix_weights(blocks), 2 * width * config.blocks, config.max_length)
