"""The weights of a ranking model as relay kernels take them: float32, layers stacked, widths filled up with zeros.

Every width is a multiple of LANES, so that rows of any matrix begin at a cache line and a product gives a row the same bits
wherever it stands among the others.  With narrower matrices some libraries do not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nestpipe.infer.history import BLOCK, aligned_floats
from nestpipe.models.fuxi import FuXiRanking
from nestpipe.models.ranking import RankingModel
from nestpipe.ops.attention import SCORE_BIAS, TWO_CHANNELS
from nestpipe.ops.event_times import BUCKETS

LANES = 16


class Shape(NamedTuple):
    """Numbers that the kernels need; widths are filled up."""

    layers: int
    heads: int
    dim: int
    """Of a token, as it is."""
    wide: int
    """Of a token."""
    head: int
    """Of a head, as it is."""
    head_wide: int
    inner: int
    """Of all heads."""
    channels: int
    hidden: int
    """Of the feed-forward layer; 0: there is none."""
    mode: int
    kind: int
    centred: bool
    """Layer norm; else RMS norm."""
    scale: np.float32


class Weights(NamedTuple):
    mixed: np.ndarray
    """[layers, wide, channels * inner + inner + ...]: to gates, values, queries and keys."""
    out: np.ndarray
    """[layers, channels * inner, wide]"""
    out_bias: np.ndarray
    up: np.ndarray
    """[layers, wide, 2 * hidden]"""
    down: np.ndarray
    """[layers, hidden, wide]"""
    by_place: np.ndarray
    """[layers, places]: the middle is distance 0; filled up, so that places behind the end of a history can be looked up."""
    by_time: np.ndarray
    places: np.ndarray
    actions: np.ndarray
    candidate: np.ndarray
    head: np.ndarray
    """[actions, dim]"""
    head_bias: np.ndarray


def filled_up(width: int) -> int:
    return -(-width // LANES) * LANES


def _zeros(*shape: int) -> np.ndarray:
    made = aligned_floats(int(np.prod(shape))).reshape(shape)
    made[...] = 0
    return made


def _array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.float32).numpy()


def pack(model: RankingModel) -> tuple[Shape, Weights]:
    """A copy of what the model is now; the model may be trained on."""
    config, fuxi = model.config, isinstance(model, FuXiRanking)
    blocks = list(model.blocks)
    first = blocks[0]
    head = config.dim // config.heads if fuxi else first.head_dim
    mode, kind = (first.attention.mode, first.time.kind) if fuxi else (SCORE_BIAS, BUCKETS)
    channels = first.attention.channels if fuxi else 1
    hidden = first.down.in_features if fuxi else 0
    shape = Shape(
        len(blocks),
        config.heads,
        config.dim,
        filled_up(config.dim),
        head,
        filled_up(head),
        config.heads * filled_up(head),
        channels,
        filled_up(hidden),
        mode,
        kind,
        not fuxi,
        np.float32(1 / config.max_length),
    )
    parts = channels + (1 if mode == TWO_CHANNELS else 3)
    each = np.concatenate([h * shape.head_wide + np.arange(head) for h in range(config.heads)])
    columns = np.concatenate([part * shape.inner + each for part in range(parts)])
    rows = columns[: channels * len(each)]
    reach = config.places + 2 * BLOCK
    weights = Weights(
        _zeros(len(blocks), shape.wide, parts * shape.inner),
        _zeros(len(blocks), channels * shape.inner, shape.wide),
        _zeros(len(blocks), shape.wide),
        _zeros(len(blocks), shape.wide, 2 * shape.hidden),
        _zeros(len(blocks), shape.hidden, shape.wide),
        _zeros(len(blocks), 2 * reach - 1),
        _zeros(len(blocks), (first.time() if fuxi else first.time_bias).numel()),
        _array(model.places).copy(),
        _array(model.action_vectors).copy(),
        _array(model.candidate_vector).copy(),
        _array(model.head.weight).copy(),
        _array(model.head.bias).copy(),
    )
    for number, block in enumerate(blocks):
        weights.mixed[number][: config.dim, columns] = _array((block.mixed if fuxi else block.uvqk).weight).T
        weights.out[number][rows, : config.dim] = _array(block.out.weight).T
        weights.out_bias[number, : config.dim] = _array(block.out.bias)
        places = _array(block.place_bias)
        start = reach - 1 - (len(places) - 1) // 2
        weights.by_place[number, start : start + len(places)] = places
        weights.by_time[number] = _array(block.time() if fuxi else block.time_bias)
        if fuxi:
            up = _array(block.up.weight).T
            weights.up[number][: config.dim, :hidden] = up[:, :hidden]
            weights.up[number][: config.dim, shape.hidden : shape.hidden + hidden] = up[:, hidden:]
            weights.down[number][:hidden, : config.dim] = _array(block.down.weight).T
    return shape, weights
