"""Training steps of a next-item model without a pipeline: forward, loss, backward, and AdamW over dense weights and items.

This is what peers' training loops do, so that steps can be compared.  The item table is one parameter, and an item's id is its
row.  Negatives are drawn in the step, since peers draw them there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.data.batch import Batch
from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.lab.gr_workloads import StepWorkload
from nestpipe.models.flops import Trained
from nestpipe.models.fuxi import FuXi, FuXiConfig
from nestpipe.models.hstu import HSTU, HSTUConfig
from nestpipe.models.next_item import NextItemModel
from nestpipe.nn.collections import place_lookups
from nestpipe.nn.local_rows import LocalRows
from nestpipe.ops import sampled_softmax
from nestpipe.tables.optimizers import SGD

BETAS = (0.9, 0.98)
RATE = 1e-3
FEATURES = ["history", "target", "negatives", "time"]


def without_kernels() -> None:
    """From now on every operator of this process is plain torch: padded samples, negatives gathered for every position."""
    for name, module in list(sys.modules.items()):
        if name.startswith("nestpipe.") and hasattr(module, "has_kernels"):
            module.has_kernels = lambda tensor: False  # type: ignore[attr-defined]
    sampled_softmax.indexed_cosines = sampled_softmax.indexed_cosines_reference


class Histories:
    """A batch as tensors: what does not change from step to step."""

    def __init__(self, drawn: dict[str, np.ndarray]) -> None:
        lengths = torch.from_numpy(drawn["lengths"])
        items, ends = torch.from_numpy(drawn["items"]), torch.cumsum(lengths + 1, 0)
        first, last = torch.ones(len(items), dtype=torch.bool), torch.ones(len(items), dtype=torch.bool)
        first[ends - lengths - 1], last[ends - 1] = False, False
        self.lengths, self.times = lengths, torch.from_numpy(drawn["times"])
        self.history, self.target = items[last], items[first]

    def features(self, negatives: Tensor) -> KeyedJaggedTensor:
        """With `negatives` [T, R]."""
        values = torch.cat([self.history, self.target, negatives.view(-1), self.times])
        n = self.lengths
        return KeyedJaggedTensor(FEATURES, values, lengths=torch.cat([n, n, negatives.shape[1] * n, n + 1]))


class Training:
    """A model, its item table and their optimizer."""

    def __init__(self, workload: StepWorkload, fused: bool) -> None:
        torch.manual_seed(workload.seed)
        self.workload = workload
        shared = (
            workload.dim,
            workload.blocks,
            workload.heads,
            workload.max_length,
            workload.dropout,
            workload.temperature,
        )
        self.model: NextItemModel = (
            HSTU(HSTUConfig(*shared)) if workload.kind == "hstu" else FuXi(FuXiConfig(*shared, feed_forward=1.0))
        )
        self.table = nn.Parameter(torch.empty(workload.items, workload.dim).normal_(0, 0.02))
        self.table.grad = torch.zeros_like(self.table)
        lookups, (places,) = place_lookups([self.model.sparse], SGD())
        self.model.sparse.attach(LocalRows(lookups), places)
        self._optimizer = torch.optim.AdamW(
            [*self.model.parameters(), self.table], RATE, BETAS, weight_decay=0.0, fused=fused
        )

    def loss(self, batch: Histories, negatives: Tensor) -> Tensor:
        features = batch.features(negatives)
        self.model.sparse.look_at(WholeTable(self.table, batch, features))
        try:
            loss, _ = self.model(Batch(features))
        finally:
            self.model.sparse.look_at(None)
        return loss

    def step(self, batch: Histories) -> float:
        workload = self.workload
        assert self.table.grad is not None
        self.model.zero_grad()
        self.table.grad.zero_()
        negatives = torch.randint(workload.items, (batch.history.numel(), workload.negatives))
        loss = self.loss(batch, negatives)
        loss.backward()
        self._optimizer.step()
        return float(loss.detach())

    def flops(self, batch: Histories) -> dict[str, int]:
        trained, cost = Trained(), self.model.cost()
        trained.add(batch.lengths)
        return {"jagged": cost.jagged(trained), "padded": cost.padded(trained)}


class WholeTable:
    """A `RowView` of a table of which every row is there: an id's place is the id."""

    features = None
    shares_rows = False

    def __init__(self, table: nn.Parameter, batch: Histories, features: KeyedJaggedTensor) -> None:
        self._table = table
        tokens = batch.history.numel()
        self._values, self._ends = features.values(), [0, tokens, 2 * tokens, len(features.values()) - len(batch.times)]

    def rows(self, group: int) -> tuple[Tensor, Tensor | None]:
        return self._table.detach(), self._table.grad

    def index(self, group: int, first: int, stop: int) -> Any:
        return self._values[self._ends[first] : self._ends[stop]]

    def used_rows(self, group: int, lookups: Sequence[int]) -> tuple[Any, list[Any]]:
        return torch.arange(self.arrived(group)), [self.index(group, at, at + 1) for at in lookups]

    def arrived(self, group: int) -> int:
        return len(self._table)


def check_weights(workload: StepWorkload, places: int) -> dict[str, np.ndarray]:
    """Weights and negatives for a loss that every variant must agree on: no dropout, and `places` places of a history."""
    training = Training(checked(workload, places), fused=False)
    tokens = int(workload.draw(0)["lengths"].sum())
    draw = np.random.default_rng(workload.seed)
    return {
        **{name: tensor.detach().numpy() for name, tensor in training.model.state_dict().items()},
        "table": training.table.detach().numpy(),
        "negatives": draw.integers(0, workload.items, (tokens, workload.negatives)),
    }


def checked(workload: StepWorkload, places: int) -> StepWorkload:
    return replace(workload, dropout=0.0, max_length=places)


def check_loss(workload: StepWorkload, places: int, batch: Histories, given: dict[str, np.ndarray]) -> float:
    """The loss of batch 0 with the weights and negatives of `check_weights`."""
    training = Training(checked(workload, places), fused=False)
    state = {name: torch.from_numpy(array) for name, array in given.items() if name not in ("table", "negatives")}
    training.model.load_state_dict(state)
    with torch.no_grad():
        training.table.copy_(torch.from_numpy(given["table"]))
        return float(training.loss(batch, torch.from_numpy(given["negatives"])))
