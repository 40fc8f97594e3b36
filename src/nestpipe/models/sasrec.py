"""SASRec for next-item prediction: causal softmax attention over a user's history, with learned places; the usual baseline.

One block, on the tokens x [T, d] of all histories, one after the other:  q = norm(x);  a = softmax(W_q q (W_k x)' / sqrt(d/h),
causal, within a history) W_v x;  y = norm(q + W_o a);  y + W_2 relu(W_1 y), with dropout after the softmax and after both layers
of the feed-forward part.  A last norm follows the blocks.  Times are not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.data.jagged import JaggedTensor
from nestpipe.models.flops import Cost, matrix_weights
from nestpipe.models.next_item import NextItemConfig, NextItemModel
from nestpipe.nn.deferred import DeferredLinear
from nestpipe.tables.config import TableDefaults

EPS = 1e-8


@dataclass(frozen=True)
class SASRecConfig(NextItemConfig):
    """The [model] section of a SASRec recipe."""

    hidden: int | None = None
    """Width of the feed-forward part.  None: dim."""
    attention_dropout: float | None = None
    """Of attention weights.  None: as dropout.  0 keeps no weights, so that memory does not grow with the square of lengths."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task == "ranking":
            raise ValueError("model.task = 'ranking' needs model.kind 'hstu' or 'fuxi'")
        if self.hidden is not None and self.hidden < 1:
            raise ValueError(f"model.hidden must be at least 1, not {self.hidden}")
        if self.attention_dropout is not None and not 0 <= self.attention_dropout < 1:
            raise ValueError(f"model.attention_dropout must be in [0, 1), not {self.attention_dropout}")


def linear(columns: int, rows: int) -> DeferredLinear:
    layer = DeferredLinear(columns, rows)
    nn.init.xavier_normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Block(nn.Module):
    """One SASRec block, on tokens without padding."""

    def __init__(self, config: SASRecConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.attention_dropout = config.dropout if config.attention_dropout is None else config.attention_dropout
        dim, hidden = config.dim, config.hidden or config.dim
        self.attention_norm = nn.LayerNorm(dim, eps=EPS)
        self.query = linear(dim, dim)
        self.key_value = linear(dim, 2 * dim)
        self.out = linear(dim, dim)
        self.forward_norm = nn.LayerNorm(dim, eps=EPS)
        self.widen = linear(dim, hidden)
        self.narrow = linear(hidden, dim)

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        asked = self.attention_norm(x)
        key, value = self.key_value(x).chunk(2, dim=1)
        each = (x.shape[0], self.heads, -1)
        dropout = self.attention_dropout if self.training else 0.0
        mixed = causal_attention(self.query(asked).view(each), key.view(each), value.view(each), lengths, dropout)
        y = self.forward_norm(asked + self.out(mixed.reshape(x.shape)))
        wide = functional.dropout(functional.relu(self.widen(y)), self.dropout, self.training)
        return y + functional.dropout(self.narrow(wide), self.dropout, self.training)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], dropout: float) -> Tensor:
    """Softmax attention within each history, of its tokens to themselves and to earlier ones.  Tensors are [T, heads, width].

    Histories of one length go together, so that nothing is padded.
    """
    together: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        together.setdefault(length, []).append(number)
    parts = [tensor.split(lengths) for tensor in (query, key, value)]
    found: list[Tensor] = [query] * len(lengths)
    for numbers in together.values():
        q, k, v = (torch.stack([part[number] for number in numbers]).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True).transpose(1, 2)
        for number, own in zip(numbers, mixed.unbind()):
            found[number] = own
    return torch.cat(found)


class SASRec(NextItemModel):
    """Tokens through SASRec blocks, one after another, and a last norm."""

    def __init__(self, config: SASRecConfig, tables: TableDefaults | None = None) -> None:
        super().__init__(config, tables)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.dim, eps=EPS)

    def encode(self, x: Tensor, history: JaggedTensor, time: JaggedTensor) -> Tensor:
        lengths = history.lengths_on_host().tolist()
        for block in self.blocks:
            x = block(x, lengths)
        return self.norm(x)

    def cost(self) -> Cost:
        """Of a pair: its score, and its weight times the value."""
        return Cost(matrix_weights(self.blocks), 2 * self.config.dim * self.config.blocks, self.config.max_length)
