"""A ranking request in float64 and plain torch, written from the formulas: what relay inference is compared with.

And small models with drawn weights, rows in memory, and histories.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from nestpipe.infer.contract import History
from nestpipe.models.fuxi import FuXiConfig, FuXiRanking
from nestpipe.models.hstu import HSTUConfig, HSTURanking
from nestpipe.models.ranking import RankingModel


class DrawnRows:
    """A `RowReader` whose rows depend on table and key alone."""

    def __init__(self, dim: int, scale: float = 0.3) -> None:
        self.dim, self.scale = dim, scale

    def read(self, table: str, keys: np.ndarray) -> np.ndarray:
        seeds = (np.asarray(keys, np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(len(table))).reshape(-1, 1)
        mixed = (seeds + np.arange(self.dim, dtype=np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0x94D049BB133111EB)
        found = (mixed >> np.uint64(40)).astype(np.float64) / 2**24 - 0.5
        return (2 * self.scale * found).astype(np.float32)


def ranker(kind: str = "hstu", seed: int = 0, actions: int = 2, **settings: Any) -> RankingModel:
    """A model whose weights are large enough for every part of it to show in the scores."""
    torch.manual_seed(seed)
    settings = {"dim": 16, "blocks": 2, "heads": 2, "max_length": 256, "dropout": 0.0, "task": "ranking", **settings}
    names = [f"action{number}" for number in range(actions)]
    model: RankingModel
    if kind == "hstu":
        model = HSTURanking(HSTUConfig(**settings), names)
    else:
        model = FuXiRanking(FuXiConfig(variant=kind, **settings), names)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 1 and not name.endswith(("time.a", "time.b", "log_b", "logit_g")):
                wide = 0.5 if "bias" in name or "time" in name or parameter.dim() == 1 else parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn_like(parameter) * wide)
    return model.eval()


def some_history(length: int, seed: int, actions: int = 2, gap: float = 3.0, items: int = 500) -> History:
    draw = np.random.default_rng(seed)
    times = 1_700_000_000 + np.cumsum(np.exp(draw.normal(gap, 2.5, length)).astype(np.int64))
    return History(draw.integers(0, items, length), draw.integers(0, 2**actions, length).astype(np.int32), times)


def first(history: History, length: int) -> History:
    """The oldest events of a history."""
    context = {name: values[:length] for name, values in history.context.items()}
    return History(history.items[:length], history.actions[:length], history.times[:length], history.start, context)


def oracle(model: RankingModel, rows: Any, history: History, now: int, candidates: np.ndarray) -> np.ndarray:
    """Logits [m, actions] in float64, all pairs at once."""
    with torch.no_grad():
        return _logits(model, rows, history, now, candidates).numpy()


def _logits(model: RankingModel, rows: Any, history: History, now: int, candidates: np.ndarray) -> Tensor:
    config, n, m = model.config, len(history), len(candidates)
    weights = {name: p.detach().double() for name, p in model.named_parameters()}

    def read(table: str, keys: np.ndarray) -> Tensor:
        return torch.from_numpy(rows.read(table, np.asarray(keys, np.int64))).double()

    did = [[(int(mask) >> a) & 1 for a in range(len(model.actions))] for mask in history.actions]
    x = read("item", history.items) * config.dim**0.5 + weights["places"][:n]
    x = x + torch.tensor(did, dtype=torch.float64).reshape(n, len(model.actions)) @ weights["action_vectors"]
    for name in config.context:
        x = x + read(name, history.context.get(name, np.zeros(n, np.int64)))
    asked = read("item", candidates) * config.dim**0.5 + weights["places"][n] + weights["candidate_vector"]
    x = torch.cat([x, asked])

    times = [int(t) for t in history.times]
    after = [*times[1:], now] if n else []
    place = torch.tensor([*range(n), *[n] * m])
    gaps = torch.tensor([[abs(s - t) for t in [*times, *[now] * m]] for s in [*after, *[now] * m]], dtype=torch.float64)
    gaps = gaps.reshape(n + m, n + m)
    sees = torch.zeros(n + m, n + m, dtype=torch.bool)
    sees[:n, :n] = torch.ones(n, n).tril().bool()
    sees[n:, :n] = True
    sees[n:, n:] = torch.eye(m, dtype=torch.bool)
    for number in range(config.blocks):
        own = {k.removeprefix(f"blocks.{number}."): v for k, v in weights.items() if k.startswith(f"blocks.{number}.")}
        bias = own["place_bias"]
        by_place = bias[(len(bias) - 1) // 2 + place[None, :] - place[:, None]]
        by_time = _time(own, gaps, config)
        x = (
            _hstu(x, own, by_place, by_time, sees, config)
            if "uvqk.weight" in own
            else _fuxi(x, own, by_place, by_time, sees, config)
        )
    out = functional.layer_norm(x[n:], (config.dim,), eps=1e-6)
    return out @ weights["head.weight"].T + weights["head.bias"]


def _time(own: dict[str, Tensor], gaps: Tensor, config: Any) -> Tensor:
    table = own.get("time_bias", own.get("time.weights"))
    if table is not None:
        buckets = [[min(128, int(math.log(max(1.0, g)) / 0.301 + 1e-12)) for g in row] for row in gaps.tolist()]
        return table[torch.tensor(buckets, dtype=torch.int64).reshape(gaps.shape)]
    if "time.b" in own:
        return own["time.a"] * (1 + gaps) ** -own["time.b"]
    b, g = own["time.log_b"].exp(), torch.sigmoid(own["time.logit_g"])
    return own["time.a"] * g ** ((gaps / config.time_unit) ** b)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.view(x.shape[0], heads, -1).transpose(0, 1)


def _pointwise(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float, sees: Tensor, config: Any) -> Tensor:
    scores = _heads(q, config.heads) @ _heads(k, config.heads).mT + bias
    weights = functional.silu(scores) / config.max_length * sees
    return (weights @ _heads(v, config.heads)).transpose(0, 1).flatten(1)


def _hstu(x: Tensor, own: dict[str, Tensor], by_place: Tensor, by_time: Tensor, sees: Tensor, config: Any) -> Tensor:
    u, v, q, k = functional.silu(functional.layer_norm(x, x.shape[1:], eps=1e-6) @ own["uvqk.weight"].T).chunk(4, 1)
    a = _pointwise(q, k, v, by_place + by_time, sees, config)
    return x + (u * functional.layer_norm(a, a.shape[1:], eps=1e-6)) @ own["out.weight"].T + own["out.bias"]


def _rms(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(1, keepdim=True) + 1e-6)


def _fuxi(x: Tensor, own: dict[str, Tensor], by_place: Tensor, by_time: Tensor, sees: Tensor, config: Any) -> Tensor:
    d = config.dim
    mixed = functional.silu(_rms(x) @ own["mixed.weight"].T)
    channels = 3 if config.variant == "alpha" else 2
    u, v = mixed[:, : channels * d], mixed[:, channels * d : (channels + 1) * d]
    parts = [(by_time * sees) @ v, (by_place * sees) @ v]
    if channels == 3:
        q, k = mixed[:, 4 * d : 5 * d], mixed[:, 5 * d :]
        parts.insert(0, _pointwise(q, k, v, 0.0, sees, config))
    o = x + (u * _rms(torch.cat(parts, 1))) @ own["out.weight"].T + own["out.bias"]
    first, second = (_rms(o) @ own["up.weight"].T).chunk(2, 1)
    return o + (functional.silu(first) * second) @ own["down.weight"].T
