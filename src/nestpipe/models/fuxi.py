"""FuXi: attention in channels by meaning, time and place, then a gated feed-forward layer; for next items and for ranking.

One block, on the tokens x [T, d] of all histories, one after the other, with norm = RMS norm without a learned scale:

  alpha   u, v, q, k = split(silu(W norm(x)));  a = [silu(q k') / N v | T v | P v], causal, within a history
  beta    u, v       = split(silu(W norm(x)));  a = [T v | P v]
  gamma   as beta

  o = x + W_0 dropout(u * norm(a)) + b_0;   result = o + W_2 (silu(W_1 z) * W_3 z)  with  z = dropout(norm(o))

P is learned per distance in places.  T is, with D the seconds between two events:

  alpha   learned per logarithmic bucket of D
  beta    a (1 + D)^-b
  gamma   a g^(D^b), with D in units of `time_unit`

Both are shared by heads.  Where a head's channels lie in a is of no importance, as W_0 is learned.  The sources do not say
gamma's unit of time.  In seconds g^(D^b) is 0 for almost every pair, so the default is a day.  `model.time` gives a variant
another one's T: TurboGR trains alpha with gamma's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.data.jagged import JaggedTensor
from nestpipe.models.flops import Cost, matrix_weights
from nestpipe.models.next_item import NextItemConfig, NextItemModel
from nestpipe.models.ranking import RankingModel
from nestpipe.nn.deferred import DeferredLinear
from nestpipe.ops.attention import THREE_CHANNELS, TWO_CHANNELS, Attention, jagged_attention
from nestpipe.ops.candidate_attention import ranking_attention
from nestpipe.ops.dropout import dropout
from nestpipe.ops.event_times import BUCKETS, DECAY, POWER, TIME_BUCKETS, EventTimes
from nestpipe.ops.gating import gated_norm, silu_product, split_silu
from nestpipe.tables.config import TableDefaults


@dataclass(frozen=True)
class FuXiConfig(NextItemConfig):
    """The [model] section of a FuXi recipe."""

    variant: Literal["alpha", "beta", "gamma"] = "alpha"
    """alpha: channels by meaning, time and place.  beta, gamma: by time and place, with a function of time."""
    time: Literal["buckets", "power", "decay"] | None = None
    """What a pair weighs by the time between its events: per bucket (alpha's own), a (1 + D)^-b (beta's), or a g^(D^b)
    (gamma's).  None: the variant's own."""
    feed_forward: float = 1.0
    """Width of the feed-forward layer, as a multiple of dim."""
    time_unit: float = 86_400.0
    """For time = "decay": seconds of a unit of time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.feed_forward * self.dim <= 2**20:
            raise ValueError(
                f"model.feed_forward times model.dim must be from 1 to {2**20:,}, not {self.feed_forward * self.dim}"
            )
        if not 1e-3 <= self.time_unit <= 1e12:
            raise ValueError(f"model.time_unit must be from 0.001 to 1e12 seconds, not {self.time_unit}")


class Block(nn.Module):
    """One FuXi block, on tokens without padding."""

    def __init__(self, config: FuXiConfig) -> None:
        super().__init__()
        d, hidden = config.dim, round(config.feed_forward * config.dim)
        scored = config.variant == "alpha"
        channels = 3 if scored else 2
        self.widths = [channels * d, d, d, d] if scored else [channels * d, d]
        self.dropout = config.dropout
        self.mixed = nn.utils.skip_init(DeferredLinear, d, sum(self.widths), bias=False)
        nn.init.normal_(self.mixed.weight, 0, 0.02)
        self.out = DeferredLinear(channels * d, d)
        self.up = nn.utils.skip_init(DeferredLinear, d, 2 * hidden, bias=False)
        self.down = DeferredLinear(hidden, d, bias=False)
        for weight in (self.out.weight, *self.up.weight.detach().chunk(2), self.down.weight):
            nn.init.xavier_uniform_(weight)
        self.place_bias = nn.Parameter(torch.empty(2 * config.places - 1).normal_(0, 0.02))
        self.time = make_time(config)
        mode = THREE_CHANNELS if scored else TWO_CHANNELS
        self.attention = Attention(config.heads, 1 / config.max_length, mode, self.time.kind)

    def forward(self, x: Tensor, events: EventTimes, candidates: JaggedTensor | None = None) -> Tensor:
        """`candidates`: the last tokens of x are those, request by request; they look at a history and at themselves."""
        u, v, *qk = split_silu(self.mixed(gated_norm(x, None, "rms")), self.widths)
        q, k = qk or (v, v)
        given = q, k, v, self.place_bias, self.time(), events
        if candidates is None:
            a = jagged_attention(*given, self.attention)
        else:
            a = ranking_attention(*given, candidates, self.attention)
        o = x + self.out(dropout(gated_norm(a, u, "rms"), self.dropout, self.training))
        z = dropout(gated_norm(o, None, "rms"), self.dropout, self.training)
        return o + self.down(silu_product(self.up(z)))


class BucketTime(nn.Module):
    """A weight for each logarithmic bucket of time."""

    kind = BUCKETS

    def __init__(self, config: FuXiConfig) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.empty(TIME_BUCKETS + 1).normal_(0, 0.02))

    def forward(self) -> Tensor:
        return self.weights


class PowerTime(nn.Module):
    """a (1 + D)^-b."""

    kind = POWER

    def __init__(self, config: FuXiConfig) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(()).uniform_(-0.2, 0.2))
        self.b = nn.Parameter(torch.empty(()).uniform_(0.4, 0.8))

    def forward(self) -> Tensor:
        return torch.stack([self.a, self.b])


class DecayTime(nn.Module):
    """a g^((D / unit)^b).  g stays between 0 and 1 and b above 0, since their logit and logarithm are learned."""

    kind = DECAY

    def __init__(self, config: FuXiConfig) -> None:
        super().__init__()
        self.unit = config.time_unit
        self.a = nn.Parameter(torch.empty(()).uniform_(-0.1, 0.1))
        self.log_b = nn.Parameter(torch.empty(()).uniform_(0.5, 2.0).log())
        self.logit_g = nn.Parameter(torch.empty(()).uniform_(0.5, 0.99).logit())

    def forward(self) -> Tensor:
        b, rate = self.log_b.exp(), -functional.logsigmoid(self.logit_g)
        return torch.stack([self.a, b, rate * self.unit**-b])


def make_time(config: FuXiConfig) -> BucketTime | PowerTime | DecayTime:
    kind = config.time or {"alpha": "buckets", "beta": "power", "gamma": "decay"}[config.variant]
    if kind == "buckets":
        return BucketTime(config)
    return PowerTime(config) if kind == "power" else DecayTime(config)


class FuXi(NextItemModel):
    """Tokens through FuXi blocks, one after another."""

    def __init__(self, config: FuXiConfig, tables: TableDefaults | None = None) -> None:
        super().__init__(config, tables)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))

    def encode(self, x: Tensor, history: JaggedTensor, time: JaggedTensor) -> Tensor:
        events = EventTimes(time)
        for block in self.blocks:
            x = block(x, events)
        return x

    def cost(self) -> Cost:
        return _cost(self.config, self.blocks)


class FuXiRanking(RankingModel):
    """History tokens and candidates through FuXi blocks, one after another."""

    def __init__(self, config: FuXiConfig, actions: Sequence[str], tables: TableDefaults | None = None) -> None:
        super().__init__(config, actions, tables)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))

    def cost(self) -> Cost:
        return _cost(self.config, self.blocks)


def _cost(config: NextItemConfig, blocks: nn.ModuleList) -> Cost:
    """Of a pair: its score, and its weight in each channel times the value."""
    products = 4 if blocks[0].attention.mode == THREE_CHANNELS else 2
    return Cost(matrix_weights(blocks), products * config.dim * config.blocks, config.max_length)
