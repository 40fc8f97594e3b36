"""Trains a small model in a pipeline on the workers of a group, and gathers what it left behind.  Runs inside workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import samples
from nestpipe.comm.world import World
from nestpipe.config.eviction import EvictionPolicy
from nestpipe.config.micro_batches import MicroBatches
from nestpipe.data.batch import Batch
from nestpipe.pipeline.pipeline import TrainPipeline
from nestpipe.sparse.batch_context import BatchContext
from nestpipe.tables.optimizers import SparseOptimizer
from oracle import Trained, dense_state_of


@dataclass(frozen=True)
class Setting:
    """One training."""

    model: str
    optimizer: SparseOptimizer
    micro_batches: MicroBatches = 1
    steps: int = 20
    dtype: str = "float64"
    seed: int = 0
    schedule: str = "serial"
    clip_norm: float | None = None
    warm_up: int = 0
    """Steps over which both learning rates rise."""
    life: EvictionPolicy | None = None

    def rate(self, step: int) -> float:
        return min(1.0, (step + 1) / (self.warm_up + 1))

    def dense_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=0.01)

    def batches(self) -> list[list[samples.Sample]]:
        """The global batches."""
        return samples.drawn(self.model, self.steps, self.seed)


@dataclass
class Part:
    """What one worker knows after training: the whole but for `trained.rows` and `trained.state`, which are its shard."""

    trained: Trained
    first_rows: dict[str, tuple[np.ndarray, Tensor]]
    first_dense: dict[str, Tensor]
    asked: dict[str, np.ndarray]
    """All rows after training, as `pipeline.rows` gives them."""
    norms: list[float]
    samples: list[int]


def make_pipeline(world: World, setting: Setting, **options: Any) -> TrainPipeline:
    # Every rank draws other dense parameters: the pipeline has to make them alike.
    model = samples.model(setting.model, setting.dtype, setting.seed + world.rank, setting.life)
    return TrainPipeline(
        model,
        setting.dense_optimizer(list(model.parameters())),
        setting.optimizer,
        schedule=setting.schedule,
        micro_batches=setting.micro_batches,
        seed=setting.seed,
        clip_norm=setting.clip_norm,
        table_rate=setting.rate,
        dense_rate=setting.rate,
        world=world,
        **options,
    )


def my_batches(world: World, setting: Setting) -> Iterator[Batch]:
    mine = samples.shard(setting.batches(), world.rank, world.size)
    return iter([samples.batch(setting.model, s, setting.dtype) for s in mine])


def train(world: World, setting: Setting, **options: Any) -> Part:
    pipeline = make_pipeline(world, setting, **options)
    keys = samples.keys_of(setting.model, setting.batches())
    first_rows = {table: (k, pipeline.rows(table, k)) for table, k in keys.items()}
    first_dense = {name: p.detach().clone() for name, p in pipeline.model.state_dict().items()}
    trained = Trained()
    spy_on_first_step(pipeline, trained)
    batches = my_batches(world, setting)
    counts = []
    while (step := pipeline.progress(batches)) is not None:
        trained.losses.append(step.loss)
        trained.norms.append(step.grad_norm)
        counts.append(step.samples)
    gather(pipeline, trained)
    asked = {table: pipeline.rows(table, k).numpy() for table, k in keys.items()}
    pipeline.close()
    return Part(trained, first_rows, first_dense, asked, trained.norms, counts)


def train_all(world: World, settings: list[Setting]) -> list[Part]:
    return [train(world, setting) for setting in settings]


def spy_on_first_step(pipeline: TrainPipeline, trained: Trained) -> None:
    """Copies the first step's gradients when all is summed and nothing updated yet."""
    agree: Callable[[BatchContext, int], None] = pipeline.engine._stages["agree"]

    def spying(context: BatchContext, micro: int) -> None:
        agree(context, micro)
        if context.number == 0:
            assert context.routes is not None
            for group, plan, buffer in zip(pipeline.sparse.groups, context.routes.owned, context.buffers):
                for number, table in enumerate(group.tables):
                    mine = np.flatnonzero(plan.tables == number)
                    mine = mine[np.argsort(plan.keys[mine])]
                    trained.keys[table.name] = plan.keys[mine]
                    trained.table_grads[table.name] = buffer.grads[mine].copy()
            grads = {name: p.grad for name, p in pipeline.model.named_parameters()}
            trained.dense_grads = {name: g.numpy().copy() for name, g in grads.items() if g is not None}

    pipeline.engine._stages["agree"] = spying


def gather(pipeline: TrainPipeline, trained: Trained) -> None:
    """This worker's shard of the tables, and the dense part.  `keys` of the first step stay under "first <table>"."""
    pipeline.settle()
    trained.keys = {f"first {table}": keys for table, keys in trained.keys.items()}
    for group, store in zip(pipeline.sparse.groups, pipeline.sparse.stores):
        for number, table in enumerate(group.tables):
            keys, slots = store.rows_of(number)
            trained.keys[table.name] = keys
            trained.rows[table.name], trained.state[table.name] = store.read(slots)
    trained.dense = {name: p.detach().numpy().copy() for name, p in pipeline.model.named_parameters()}
    trained.dense_state = dense_state_of(pipeline.optimizer, pipeline.model)


def joined(parts: list[Part]) -> Trained:
    """The whole tables from all workers' shards; every key has one owner; everything else is bit for bit the same everywhere."""
    first = parts[0].trained
    whole = Trained(
        first.losses, first.norms, dense=first.dense, dense_state=first.dense_state, dense_grads=first.dense_grads
    )
    for part in parts[1:]:
        assert part.trained.losses == first.losses and part.norms == parts[0].norms and part.samples == parts[0].samples
        for name in first.dense:
            assert np.array_equal(part.trained.dense[name], first.dense[name]), f"workers differ in {name}"
        for name in first.dense_state:
            assert np.array_equal(part.trained.dense_state[name], first.dense_state[name]), f"workers differ in {name}"
    for table in first.rows:
        whole.keys[table], whole.rows[table], whole.state[table] = _sorted(
            [p.trained.keys[table] for p in parts],
            [p.trained.rows[table] for p in parts],
            [p.trained.state[table] for p in parts],
        )
        whole.keys[f"first {table}"], whole.table_grads[table] = _sorted(
            [p.trained.keys[f"first {table}"] for p in parts], [p.trained.table_grads[table] for p in parts]
        )
    return whole


def _sorted(keys: list[np.ndarray], *columns: list[np.ndarray]) -> tuple[np.ndarray, ...]:
    everything = np.concatenate(keys)
    assert len(np.unique(everything)) == len(everything), "a key has two owners"
    order = np.argsort(everything)
    return (everything[order], *(np.concatenate(column)[order] for column in columns))


def everything(pipeline: TrainPipeline) -> dict[str, bytes]:
    """All that training can change on this worker, as bytes."""
    trained = Trained()
    gather(pipeline, trained)
    parts = {"keys": trained.keys, "rows": trained.rows, "state": trained.state}
    parts |= {"dense": trained.dense, "dense state": trained.dense_state}
    return {f"{part} {name}": value.tobytes() for part, named in parts.items() for name, value in named.items()}
