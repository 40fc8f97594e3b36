"""The oracle: the same training in plain single-process torch, on whole global batches, with fixed dense tables.

It shares the models' own code, but their collections, kernels and optimizers are replaced by plain torch operations, and it
knows nothing of workers, micro-batches, windows or dynamic tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from nestpipe.data.batch import Batch
from nestpipe.data.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from nestpipe.nn.collections import Collection, UniqueRows
from nestpipe.ops.attention import SCORE_BIAS, TWO_CHANNELS, Attention
from nestpipe.ops.event_times import BUCKETS, POWER, EventTimes
from nestpipe.tables.config import EmbeddingBagConfig, TableConfig
from nestpipe.tables.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad, SparseOptimizer


@dataclass
class Trained:
    """What a training left behind, by the oracle or by a pipeline."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """Gradient norm of every step, dense and tables."""
    keys: dict[str, np.ndarray] = field(default_factory=dict)
    """Per table, ascending."""
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    dense: dict[str, np.ndarray] = field(default_factory=dict)
    dense_state: dict[str, np.ndarray] = field(default_factory=dict)
    table_grads: dict[str, np.ndarray] = field(default_factory=dict)
    """Of the first step, for all keys."""
    dense_grads: dict[str, np.ndarray] = field(default_factory=dict)
    """Of the first step."""


# Tables


class OracleTables(nn.Module):
    """One dense embedding per table over a known set of keys; stands where a model has its collection."""

    def __init__(
        self, collection: Collection, first_rows: dict[str, tuple[np.ndarray, Tensor]], sparse_grads: bool
    ) -> None:
        super().__init__()
        self.lookups: list[tuple[TableConfig, str, str]] = list(collection.lookups)
        self.sparse_grads = sparse_grads
        self.keys = {table.name: torch.from_numpy(first_rows[table.name][0]) for table in collection.tables}
        self.weights = nn.ParameterDict(
            {t.name: nn.Parameter(first_rows[t.name][1].clone()) for t in collection.tables}
        )

    def places(self, table: str, ids: Tensor) -> Tensor:
        found = torch.searchsorted(self.keys[table], ids)
        assert torch.equal(self.keys[table][found], ids), "the oracle was not told of a key"
        return found

    def looked_up(self, table: str, ids: Tensor) -> Tensor:
        return functional.embedding(self.places(table, ids), self.weights[table], sparse=self.sparse_grads)


class OracleBags(OracleTables):
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        names, dims, pooled = [], [], []
        for table, feature, name in self.lookups:
            assert isinstance(table, EmbeddingBagConfig)
            part = features[feature]
            weights = part.weights_or_none()
            if weights is None:
                places = self.places(table.name, part.values())
                bags = functional.embedding_bag(
                    places,
                    self.weights[table.name],
                    part.offsets(),
                    mode=table.pooling,
                    sparse=self.sparse_grads,
                    include_last_offset=True,
                )
            else:  # embedding_bag has no weighted mean
                sample, _ = part.places()
                weighted = self.looked_up(table.name, part.values()) * weights[:, None].to(
                    self.weights[table.name].dtype
                )
                bags = weighted.new_zeros(features.stride(), table.embedding_dim).index_add(0, sample, weighted)
                if table.pooling == "mean":
                    bags = bags / part.lengths().clamp(min=1)[:, None]
            names.append(name)
            dims.append(table.embedding_dim)
            pooled.append(bags)
        return KeyedTensor(names, dims, torch.cat(pooled, dim=1))


class OracleSequences(OracleTables):
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        return {
            name: JaggedTensor(
                self.looked_up(table.name, features[feature].values()),
                features[feature].weights_or_none(),
                lengths=features[feature].lengths(),
            )
            for table, feature, name in self.lookups
        }

    def unique_rows(self, features: KeyedJaggedTensor) -> dict[str, UniqueRows]:
        found = {}
        for table in dict.fromkeys(table.name for table, _, _ in self.lookups):
            mine = [(feature, name) for t, feature, name in self.lookups if t.name == table]
            unique, inverse = torch.unique(torch.cat([features[f].values() for f, _ in mine]), return_inverse=True)
            rows = self.looked_up(table, unique)
            index = torch.split(inverse, [features[f].values().numel() for f, _ in mine])
            for (feature, name), places in zip(mine, index):
                found[name] = UniqueRows(rows, places, features[feature])
        return found


# Kernels


def plain_pair_weights(times: Tensor, place: Tensor, time: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    """[n, n] by time and [n, n] by place, of one history: place i looks back at j, at the time of event i + 1."""
    n = len(times) - 1
    centre = (place.shape[0] - 1) // 2
    zero = torch.zeros((), dtype=place.dtype)
    by_time = [[zero] * n for _ in range(n)]
    by_place = [[zero] * n for _ in range(n)]
    for i in range(n):
        for j in range(i + 1):
            gap = abs(int(times[i + 1]) - int(times[j]))
            by_place[i][j] = place[centre + j - i]
            if kind == BUCKETS:
                by_time[i][j] = time[plain_bucket(gap)]
            elif kind == POWER:
                by_time[i][j] = time[0] * (1.0 + gap) ** -time[1]
            else:
                by_time[i][j] = time[0] * torch.exp(-time[2] * float(gap) ** time[1])
    return tuple(
        torch.stack([torch.stack(row) for row in rows]) if n else place.new_zeros(0, 0) for rows in (by_time, by_place)
    )


def plain_bucket(gap: int) -> int:
    return min(128, int(math.log(max(1, gap)) / 0.301))


def plain_jagged_attention(
    q: Tensor, k: Tensor, v: Tensor, by_place: Tensor, by_time: Tensor, events: EventTimes, attention: Attention
) -> Tensor:
    """Sample by sample and head by head."""
    found, lengths, heads = [], (events.time.lengths() - 1).tolist(), attention.heads
    parts = zip(*(torch.split(x, lengths) for x in (q, k, v)), events.time.to_dense(), strict=True)
    for queries, keys, values, times in parts:
        t, p = plain_pair_weights(times, by_place, by_time, attention.kind)
        channels = [] if attention.mode == SCORE_BIAS else [t @ values, p @ values]
        if attention.mode != TWO_CHANNELS:
            of_heads = []
            for q_h, k_h, v_h in zip(*(x.chunk(heads, dim=1) for x in (queries, keys, values)), strict=True):
                scores = q_h @ k_h.T + (t + p if attention.mode == SCORE_BIAS else 0)
                of_heads.append(torch.tril(scores * torch.sigmoid(scores) * attention.scale) @ v_h)
            channels.insert(0, torch.cat(of_heads, dim=1))
        found.append(torch.cat(channels, dim=1))
    return torch.cat(found)


def plain_gated_attention(
    mixed: Tensor, by_place: Tensor, by_time: Tensor, events: EventTimes, heads: int, scale: float
) -> Tensor:
    u, v, q, k = plain_split_silu(mixed, [mixed.shape[1] // 4] * 4)
    a = plain_jagged_attention(q, k, v, by_place, by_time, events, Attention(heads, scale))
    return plain_gated_norm(a, u, "layer")


def plain_split_silu(mixed: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
    return torch.split(mixed * torch.sigmoid(mixed), list(widths), dim=1)


def plain_gated_norm(x: Tensor, gate: Tensor | None, norm: str) -> Tensor:
    centred = x - x.mean(1, keepdim=True) if norm == "layer" else x
    normed = centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt()
    return normed if gate is None else normed * gate


def plain_silu_product(mixed: Tensor) -> Tensor:
    first, second = mixed.chunk(2, dim=1)
    return first * torch.sigmoid(first) * second


def plain_indexed_cosines(queries: Tensor, rows: Tensor, index: Tensor) -> Tensor:
    unit_queries, unit_rows = (x / x.norm(dim=1, keepdim=True).clamp_min(1e-6) for x in (queries, rows))
    return (unit_queries[:, None, :] * unit_rows[index.long()]).sum(-1)


def plain_interact(first: Tensor | None, others: Tensor) -> Tensor:
    vectors = list(others.unbind(1)) if first is None else [first, *others.unbind(1)]
    pairs = [(a * b).sum(-1)[:, None] for i, a in enumerate(vectors) for b in vectors[:i]]
    return torch.cat(pairs if first is None else [first, *pairs], dim=1)


@contextmanager
def plain_kernels() -> Iterator[None]:
    """While entered, the models compute with plain torch in place of our kernels."""
    with (
        mock.patch("nestpipe.models.hstu.gated_attention", plain_gated_attention),
        mock.patch("nestpipe.models.hstu.gated_norm", plain_gated_norm),
        mock.patch("nestpipe.models.fuxi.jagged_attention", plain_jagged_attention),
        mock.patch("nestpipe.models.fuxi.split_silu", plain_split_silu),
        mock.patch("nestpipe.models.fuxi.gated_norm", plain_gated_norm),
        mock.patch("nestpipe.models.fuxi.silu_product", plain_silu_product),
        mock.patch("nestpipe.ops.sampled_softmax.indexed_cosines", plain_indexed_cosines),
        mock.patch("nestpipe.models.dlrm.interact", plain_interact),
    ):
        yield


# Optimizers


class PlainRowWiseAdagrad(torch.optim.Optimizer):
    """One accumulator per row: the sum over steps of the mean over the row of the squared gradient."""

    def __init__(self, params: Sequence[nn.Parameter], lr: float, eps: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                total = self.state[p].setdefault("sum", torch.zeros(p.shape[0], 1, dtype=p.dtype))
                total += p.grad.square().mean(dim=1, keepdim=True)
                p -= group["lr"] * p.grad / (total.sqrt() + group["eps"])


def torch_optimizer(optimizer: SparseOptimizer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The torch optimizer that must do the same; a row without gradient has to stay as it is."""
    match optimizer:
        case SGD():
            return torch.optim.SGD(parameters, lr=optimizer.lr)
        case Adagrad():
            return torch.optim.Adagrad(parameters, lr=optimizer.lr, eps=optimizer.eps)
        case Adam():
            return torch.optim.SparseAdam(parameters, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps)
        case RowWiseAdagrad():
            return PlainRowWiseAdagrad(parameters, lr=optimizer.lr, eps=optimizer.eps)
    raise AssertionError(f"the oracle does not know {optimizer}")


def state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> np.ndarray:
    """In the layout of our stores: Adam's exp_avg, then exp_avg_sq."""
    state = optimizer.state[parameter]
    parts = [state[name] for name in ("sum", "exp_avg", "exp_avg_sq") if name in state]
    return torch.cat(parts, dim=1).numpy() if parts else np.empty((parameter.shape[0], 0))


def dense_state_of(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> dict[str, np.ndarray]:
    found = {}
    for name, parameter in dense_parameters(model).items():
        for what, value in (optimizer.state[parameter] if optimizer else {}).items():
            found[f"{name}.{what}"] = np.array(value.numpy(), copy=True)
    return found


def dense_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters but those of an oracle's tables."""
    tables = {id(p) for m in model.modules() if isinstance(m, OracleTables) for p in m.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) not in tables}


# Training


def train(
    model: nn.Module,
    first_rows: dict[str, tuple[np.ndarray, Tensor]],
    batches: Sequence[Batch],
    optimizer: SparseOptimizer,
    make_dense: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None,
    clip_norm: float | None = None,
    table_rate: Callable[[int], float] = lambda step: 1.0,
    dense_rate: Callable[[int], float] = lambda step: 1.0,
    one_batch_old: bool = False,
) -> Trained:
    """One step per global batch on the mean loss over it.  `model.sparse` is replaced; its dense part is trained in place.

    `one_batch_old`: the loss and its gradients are those of the tables as they were before the last step.
    """
    sparse_grads = isinstance(optimizer, Adam)
    kind = OracleBags if isinstance(model.sparse.tables[0], EmbeddingBagConfig) else OracleSequences
    model.sparse = kind(model.sparse, first_rows, sparse_grads)
    tables = model.sparse
    parameters = list(dense_parameters(model).values())
    dense = make_dense(parameters) if make_dense else None
    steps = torch_optimizer(optimizer, list(tables.weights.values()))
    rates = [group["lr"] for group in dense.param_groups] if dense else []
    everything = [*parameters, *tables.weights.values()]
    trained = Trained(keys={name: keys for name, (keys, _) in first_rows.items()})
    before: list[Tensor] = []
    with plain_kernels():
        for number, batch in enumerate(batches):
            for p in everything:
                p.grad = None
            newest = [w.data.clone() for w in tables.weights.values()]
            for w, values in zip(tables.weights.values(), before if one_batch_old and number else newest):
                w.data.copy_(values)
            loss, _ = model(batch)
            loss.backward()
            for w, values in zip(tables.weights.values(), newest):
                w.data.copy_(values)
            before = newest
            for p in parameters:  # the pipeline's gradients are never None
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            trained.losses.append(float(loss.detach()))
            if number == 0:
                trained.table_grads = {name: _dense(w).numpy().copy() for name, w in tables.weights.items()}
                trained.dense_grads = {n: p.grad.numpy().copy() for n, p in dense_parameters(model).items()}
            if clip_norm is not None:
                trained.norms.append(float(nn.utils.clip_grad_norm_(everything, clip_norm)))
            for group in steps.param_groups:
                group["lr"] = optimizer.lr * table_rate(number)
            steps.step()
            if dense is not None:
                for group, rate in zip(dense.param_groups, rates):
                    group["lr"] = rate * dense_rate(number)
                dense.step()
    trained.rows = {name: w.detach().numpy() for name, w in tables.weights.items()}
    trained.state = {name: state_of(steps, w) for name, w in tables.weights.items()}
    trained.dense = {name: p.detach().numpy() for name, p in dense_parameters(model).items()}
    trained.dense_state = dense_state_of(dense, model)
    return trained


def _dense(parameter: nn.Parameter) -> Tensor:
    grad = parameter.grad
    if grad is None:
        return torch.zeros_like(parameter)
    return grad.to_dense() if grad.is_sparse else grad


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference, relative to the largest entry of `b`: what rounding errors of sums are measured by."""
    assert a.shape == b.shape, f"{a.shape} is not {b.shape}"
    if b.size == 0:
        return 0.0
    difference, scale = float(np.abs(a - b).max()), float(np.abs(b).max())
    return difference / scale if scale else (0.0 if difference == 0 else math.inf)
