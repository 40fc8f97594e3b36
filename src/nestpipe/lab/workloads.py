"""What the workers of a rung train: a model, its first rows, and batches that take no time to read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from nestpipe.data.batch import Batch
from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.lab.settings import WorkerOptions
from nestpipe.models.dlrm import DLRM, DLRMConfig
from nestpipe.models.hstu import HSTU, HSTUConfig
from nestpipe.models.timed import Timed, TimedConfig
from nestpipe.pipeline import TrainPipeline


class RungWorkload(Protocol):
    """Made from `RungSettings.workload` and `.options`."""

    def model(self) -> nn.Module: ...

    def fill_tables(self, pipeline: TrainPipeline) -> None: ...

    def batches(self, rank: int) -> Iterator[Batch]:
        """Endless batches from a pool made in this call; every KeyedJaggedTensor is new, as a reader's would be."""


class DLRMWorkload:
    """One-hot features with power-law ids; samples, first rows and dense weights are those of the peers."""

    def __init__(self, config: dict[str, Any], options: WorkerOptions, same: Any) -> None:
        self._config, self._options, self._same = config, options, same
        self._names = [f"f{f}" for f in range(config["features"])]

    def model(self) -> nn.Module:
        config = self._config
        if self._options.compute_ms is not None:
            return _timed(config, self._options, self._names)
        settings = DLRMConfig(config["dim"], config["bottom"][:-1], config["top"][:-1])
        return DLRM(settings, self._names, config["dense_features"])

    def fill_tables(self, pipeline: TrainPipeline) -> None:
        """Gives every table the rows that peers start from, so that losses can be compared."""
        for feature, name in enumerate(self._names):
            group, number = pipeline.place_of(name)
            store = pipeline.stores[group]
            keys = np.arange(self._config["ids"], dtype=np.int64)
            tables = np.full(len(keys), number, np.uint16)
            mine = pipeline.topology.shard.owns(tables, keys)
            values = self._same.first_rows(self._config, feature)[mine]
            state = np.zeros((len(values), store.group.state_width), np.float32)
            store.writeback(tables[mine], keys[mine], values, state)

    def batches(self, rank: int) -> Iterator[Batch]:
        config = self._config
        lengths = torch.ones(config["features"] * config["batch"], dtype=torch.int64)
        drawn = (self._same.samples(config, rank, i) for i in range(config["distinct_batches"]))
        pool = [[torch.from_numpy(part) for part in parts] for parts in drawn]

        def cycle() -> Iterator[Batch]:
            for dense, ids, labels in itertools.cycle(pool):
                yield Batch(KeyedJaggedTensor(self._names, ids.view(-1), lengths=lengths), dense, labels)

        return cycle()


class HSTUWorkload:
    """Histories of one length.  Users have one of `groups` interests with power-law items; negatives are uniform."""

    def __init__(self, config: dict[str, Any], options: WorkerOptions) -> None:
        self._config, self._options = config, options

    def model(self) -> nn.Module:
        config = self._config
        if self._options.compute_ms is not None:
            return _timed(config, self._options, ["history", "target", "negatives"])
        settings = HSTUConfig(
            config["dim"], config["blocks"], config["heads"], max_length=config["length"], dropout=0.0
        )
        return HSTU(settings)

    def fill_tables(self, pipeline: TrainPipeline) -> None:
        """Nothing to do: the seed gives a row its first value when it is first trained."""

    def batches(self, rank: int) -> Iterator[Batch]:
        pool = [self._draw(rank, number) for number in range(self._config["distinct_batches"])]

        def cycle() -> Iterator[Batch]:
            for values, lengths, terms in itertools.cycle(pool):
                features = KeyedJaggedTensor(["history", "target", "negatives", "time"], values, lengths=lengths)
                yield Batch(features, loss_terms=terms)

        return cycle()

    def _draw(self, rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = self._config
        rng = np.random.default_rng([config["seed"], rank, number])
        users, length, negatives = config["batch"], config["length"], config["negatives"]
        own = config["items"] // config["groups"]
        places = np.minimum(own ** rng.random((users, length + 1)), own) - 1  # a power law of exponent 1
        groups = rng.integers(0, config["groups"], (users, 1))
        items = groups + places.astype(np.int64) * config["groups"]
        others = rng.integers(0, config["items"], (users, length * negatives))
        times = np.cumsum(rng.integers(1, 10_000, (users, length + 1)), axis=1)
        parts = [items[:, :-1], items[:, 1:], others, times]
        values = torch.from_numpy(np.concatenate([np.ravel(part) for part in parts]))
        lengths = torch.tensor([part.shape[1] for part in parts]).repeat_interleave(users)
        return values, lengths, torch.full((users,), float(length))


def _timed(config: dict[str, Any], options: WorkerOptions, features: list[str]) -> nn.Module:
    """A stand-in whose dense compute takes `compute_ms` and no CPU."""
    assert options.compute_ms is not None
    third = options.compute_ms / 3
    return Timed(TimedConfig(config["dim"], third, 2 * third, config["batch"], options.dense_parameters), features)
