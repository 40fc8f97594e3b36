"""Jagged attention where a kernel cannot multiply by itself: blocks of rows through `torch.matmul`.

Arguments are those of `attention_kernels`.  A block is `rows` places with all places that they look at: memory is linear in
a history's length here, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe.ops.attention_kernels import SCORE_BIAS, THREE_CHANNELS, TWO_CHANNELS, weigh, weigh_backward
from nestpipe.ops.event_kernels import biases, biases_backward, in_order


@dataclass
class _Block:
    low: int
    high: int
    asked: slice
    """Its queries."""
    seen: slice
    """The keys that they look at."""
    history: tuple[Any, ...]

    @property
    def tile(self) -> tuple[int, int, int, int]:
        return self.low, 0, self.high - self.low, self.high

    def biases(self, like: Tensor) -> tuple[Tensor, Tensor]:
        found = like.new_empty(2, self.high - self.low, self.high)
        biases(*self.tile, self.history, *found.view(2, -1).numpy())
        return found[0], found[1]


def _blocks(starts: tuple[Any, Any], pairs: tuple[Any, ...], rows: int) -> Iterator[_Block]:
    (query_starts, key_starts), (times, *rest) = starts, pairs
    for b in range(len(key_starts) - 1):
        first, last = int(key_starts[b]), int(key_starts[b + 1])
        own = times[first + b : last + b + 1]
        low = last - first - int(query_starts[b + 1] - query_starts[b])
        shift = int(query_starts[b]) - low
        history = own, in_order(own), *rest
        while low < last - first:
            high = min(last - first, (low // rows + 1) * rows)
            yield _Block(low, high, slice(shift + low, shift + high), slice(first, first + high), history)
            low = high


def _by_head(tokens: Tensor, heads: int) -> Tensor:
    """[H, places, width]"""
    return tokens.reshape(tokens.shape[0], heads, -1).transpose(0, 1)


def _joined(by_head: Tensor) -> Tensor:
    return by_head.transpose(0, 1).flatten(1)


def attend_by_blocks(
    vectors: Any, starts: Any, pairs: Any, mode: int, heads: int, scale: Any, rows: int, out: Any
) -> None:
    """As `attention_kernels.attend`."""
    q, k, v = (torch.from_numpy(a) for a in vectors)
    to = torch.from_numpy(out)
    for block in _blocks(starts, pairs, rows):
        values = v[block.seen].clone()  # products may depend on where a matrix begins: a copy begins at a cache line
        of_time, of_place = block.biases(v)
        found: list[Tensor] = []
        if mode != TWO_CHANNELS:
            scores = _by_head(q[block.asked].clone(), heads) @ _by_head(k[block.seen].clone(), heads).mT
            bias = (of_time + of_place).view(-1).numpy()
            for score in scores:
                weigh(*block.tile, score.view(-1).numpy(), bias, mode == SCORE_BIAS, scale)
            found.append(_joined(scores @ _by_head(values, heads)))
        if mode != SCORE_BIAS:
            found += [of_time @ values, of_place @ values]
        torch.cat(found, dim=1, out=to[block.asked])


def attend_by_blocks_backward(
    vectors: Any, starts: Any, pairs: Any, mode: int, heads: int, scale: Any, rows: int, grad: Any, passed: Any
) -> None:
    """As `attention_kernels.attend_backward`."""
    q, k, v, grads = (torch.from_numpy(a) for a in (*vectors, grad))
    by_q, by_k, by_v = (torch.from_numpy(a) for a in passed[:3])
    d = v.shape[1]
    for block in _blocks(starts, pairs, rows):
        values, g = v[block.seen], grads[block.asked]
        of_time, of_place = block.biases(v)
        if mode != TWO_CHANNELS:
            queries, keys, by_out = (_by_head(t, heads) for t in (q[block.asked], k[block.seen], g[:, :d]))
            scores, by_weights = queries @ keys.mT, by_out @ _by_head(values, heads).mT
            bias, sums = (of_time + of_place).view(-1).numpy(), torch.zeros_like(of_time)
            for head, (score, by_weight) in enumerate(zip(scores, by_weights, strict=True)):
                of_pairs = score.view(-1).numpy(), by_weight.view(-1).numpy()
                weigh_backward(
                    *block.tile, *of_pairs, bias, mode == SCORE_BIAS, scale, sums.view(-1).numpy(), head == 0
                )
            by_v[block.seen] += _joined(scores.mT @ by_out)
            by_q[block.asked] = _joined(by_weights @ keys)
            by_k[block.seen] += _joined(by_weights.mT @ queries)
        if mode == SCORE_BIAS:
            by_time = by_place = sums
        else:
            start = d if mode == THREE_CHANNELS else 0
            of_t, of_p = g[:, start : start + d], g[:, start + d :]
            by_v[block.seen] += of_time.T @ of_t + of_place.T @ of_p
            by_time, by_place = of_t @ values.T, of_p @ values.T
        room = np.empty((4, 2 * block.high), grad.dtype)
        flat = by_time.view(-1).numpy(), by_place.view(-1).numpy()
        biases_backward(*block.tile, block.history, *flat, room, *passed[3:])
