"""HSTU for next-item prediction: pointwise gated attention over a user's history, trained with sampled softmax.

One block, on x [B, n, d]:  u, v, q, k = split(silu(W norm(x)));  a = (silu(q k' + bias) / N, causal) v;
x + W_o dropout(u * norm(a)).  No softmax in the attention, no feed-forward part.  `bias` is learned per distance in places and
per logarithmic bucket of the time between the two events.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.data.batch import Batch
from nestpipe.data.jagged import JaggedTensor
from nestpipe.embedding import EmbeddingCollection
from nestpipe.late_layers import LateLinear
from nestpipe.models.relative_bias import TIME_BUCKETS, relative_bias, time_buckets
from nestpipe.models.sampled_softmax import sampled_softmax_loss
from nestpipe.tables.config import TableDefaults


@dataclass(frozen=True)
class HSTUConfig:
    """The [model] section of an HSTU recipe."""

    dim: int = 50
    """Embedding dimension."""
    blocks: int = 2
    heads: int = 1
    head_dim: int | None = None
    """Per head, for queries, keys, values and gates; None: dim / heads."""
    max_length: int = 200
    """Longest history; data.max_length must not be above it."""
    dropout: float = 0.2
    temperature: float = 0.05

    def __post_init__(self) -> None:
        for name in ("dim", "blocks", "heads", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be at least 1, not {getattr(self, name)}")
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"model.dim ({self.dim}) must be a multiple of model.heads ({self.heads})")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout must be in [0, 1), not {self.dropout}")
        if not self.temperature > 0:
            raise ValueError(f"model.temperature must be above 0, not {self.temperature}")


class Block(nn.Module):
    """One HSTU block.  Padding lies at the end of a row and is never seen by real places, which only look back."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.width = config.head_dim or config.dim // config.heads
        self.max_length = config.max_length
        inner = self.heads * self.width
        self.uvqk = nn.utils.skip_init(LateLinear, config.dim, 4 * inner, bias=False)
        with torch.no_grad():
            self.uvqk.weight.copy_(torch.empty(config.dim, 4 * inner).normal_(0, 0.02).t())
        self.out = LateLinear(inner, config.dim)
        nn.init.xavier_uniform_(self.out.weight)
        self.dropout = config.dropout
        self.place_bias = nn.Parameter(torch.empty(2 * config.max_length - 1).normal_(0, 0.02))
        self.time_bias = nn.Parameter(torch.empty(TIME_BUCKETS + 1).normal_(0, 0.02))

    def forward(self, x: Tensor, bucket: Tensor, lengths: Tensor, causal: Tensor) -> Tensor:
        batch, n, dim = x.shape
        mixed = functional.silu(self.uvqk(functional.layer_norm(x, (dim,), eps=1e-6)))
        u, v, q, k = mixed.view(batch, n, 4, self.heads, self.width).permute(2, 0, 3, 1, 4)
        bias = relative_bias(self.place_bias, self.time_bias, bucket, lengths)
        scores = q @ k.transpose(-1, -2) + bias[:, None]
        attention = functional.silu(scores) * (causal / self.max_length)
        a = (attention @ v).transpose(1, 2).reshape(batch, n, -1)
        gated = u.transpose(1, 2).reshape(batch, n, -1) * functional.layer_norm(a, (a.shape[-1],), eps=1e-6)
        return x + self.out(functional.dropout(gated, self.dropout, self.training))


class HSTU(nn.Module):
    """Next-item prediction.  In training, the mean sampled-softmax loss over all positions; in evaluation, a query per user.

    Features: `history` [n ids], `target` (the next item of every position; one in evaluation), `negatives` (the same number for
    every position), `time` [n + 1 times].  Outputs: unit vectors [B, dim] of each user's last position; score them against
    unit item vectors.
    """

    table = "item"

    def __init__(self, config: HSTUConfig, tables: TableDefaults | None = None) -> None:
        super().__init__()
        tables = tables or TableDefaults(init="normal", init_scale=0.02)
        self.config = config
        self.sparse = EmbeddingCollection([tables.sequence(self.table, config.dim, ["history", "target", "negatives"])])
        self.places = nn.Parameter(torch.empty(config.max_length, config.dim).normal_(0, 0.02))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        features = batch.sparse_features
        found = self.sparse.unique_rows(features)
        history, rows = found["history"], found["history"].rows
        lengths = history.lengths
        jagged = JaggedTensor(functional.embedding(history.index, rows), lengths=lengths)
        sample, place = jagged.places()
        encoded = self.encode(jagged, features["time"], sample, place)
        queries = functional.normalize(encoded[sample, place], dim=1, eps=1e-6)
        last = queries[jagged.offsets()[1:] - 1].detach()
        if not self.training:
            return queries.new_zeros(()), last
        target, negatives = found["target"].index, found["negatives"].index
        if target.numel() != queries.shape[0]:
            raise ValueError("HSTU trains on one target per history position; 'target' and 'history' differ in length")
        unit = functional.normalize(rows, dim=1, eps=1e-6)
        loss = sampled_softmax_loss(queries, unit, target, negatives.view(target.numel(), -1), self.config.temperature)
        return loss, last

    def encode(self, history: JaggedTensor, time: JaggedTensor, sample: Tensor, place: Tensor) -> Tensor:
        """[B, n, dim] for the padded histories of a batch."""
        lengths = history.lengths()
        longest = int(lengths.max())
        if int(lengths.min()) == 0:
            raise ValueError("HSTU needs at least one item in every history: leave users without one out of the data")
        if longest > self.config.max_length:
            raise ValueError(f"a history has {longest} items; raise model.max_length ({self.config.max_length})")
        if not torch.equal(time.lengths(), lengths + 1):
            raise ValueError(
                "HSTU needs the times of a history and of what follows it: 'time' has one entry more than 'history'"
            )
        dim = self.config.dim
        values = history.values() * dim**0.5 + functional.embedding(place, self.places)
        x = values.new_zeros(lengths.numel(), longest, dim)
        x = x.index_put((sample, place), functional.dropout(values, self.config.dropout, self.training))
        causal = torch.tril(torch.ones(longest, longest, dtype=x.dtype, device=x.device))
        bucket = time_buckets(time, longest)
        for block in self.blocks:
            x = block(x, bucket, lengths, causal)
        return x
