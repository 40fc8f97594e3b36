"""Small models and batches for the simulated device, trained under any schedule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from nestpipe.comm.world import World
from nestpipe.data.batch import Batch
from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.device import sim
from nestpipe.models.dlrm import DLRM, DLRMConfig
from nestpipe.models.fuxi import FuXi, FuXiConfig
from nestpipe.models.hstu import HSTU, HSTUConfig
from nestpipe.pipeline import TrainPipeline
from nestpipe.tables.config import TableDefaults
from nestpipe.tables.optimizers import Adagrad


def dlrm(pooling: str = "sum", dtype: str = "float32") -> nn.Module:
    """Two features: keys from a small pool, so that consecutive batches share rows."""
    model = DLRM(DLRMConfig(dim=4, bottom=[8], top=[8], pooling=pooling), ["a", "b"], 3, TableDefaults(dtype))
    return model.double() if dtype == "float64" else model


def clicks(
    steps: int, rank: int = 0, samples: int = 7, ids: int = 12, dtype: torch.dtype = torch.float32
) -> Iterator[Batch]:
    """Keys of one batch in two, of all batches, and of one batch alone."""
    rng = np.random.default_rng(100 + rank)
    for step in range(steps):
        lengths = rng.integers(0, 3, 2 * samples)
        keys = rng.integers(0, ids, lengths.sum())
        keys = np.where(rng.random(len(keys)) < 0.3, 1000 * (step % 2) + keys, keys)
        dense = torch.from_numpy(rng.random((samples, 3), np.float32)).to(dtype)
        yield Batch(
            KeyedJaggedTensor(["a", "b"], torch.from_numpy(keys), lengths=torch.from_numpy(lengths)),
            dense,
            torch.from_numpy(rng.integers(0, 2, samples).astype(np.float32)),
        )


def hstu() -> nn.Module:
    return HSTU(HSTUConfig(dim=8, blocks=1, heads=2, max_length=6, dropout=0.1))


def fuxi(variant: Literal["alpha", "beta", "gamma"] = "alpha") -> nn.Module:
    return FuXi(FuXiConfig(dim=8, blocks=1, heads=2, max_length=6, dropout=0.1, variant=variant))


def histories(steps: int, rank: int = 0, users: int = 5, items: int = 15, negatives: int = 2) -> Iterator[Batch]:
    rng = np.random.default_rng(200 + rank)
    for _ in range(steps):
        lengths = rng.integers(1, 7, users)
        parts = {
            "history": (lengths, rng.integers(0, items, lengths.sum())),
            "target": (lengths, rng.integers(0, items, lengths.sum())),
            "negatives": (negatives * lengths, rng.integers(0, items, negatives * lengths.sum())),
            "time": (lengths + 1, np.sort(rng.integers(0, 10**6, (lengths + 1).sum()))),
        }
        features = KeyedJaggedTensor(
            list(parts),
            torch.from_numpy(np.concatenate([ids for _, ids in parts.values()])),
            lengths=torch.from_numpy(np.concatenate([counts for counts, _ in parts.values()])),
        )
        yield Batch(features, loss_terms=torch.from_numpy(lengths.astype(np.float32)))


@dataclasses.dataclass
class Trained:
    """What a run left, on the host."""

    losses: list[float]
    norms: list[float]
    rows: dict[str, np.ndarray]
    dense: list[np.ndarray]
    figures: dict[str, Any]

    def same(self, other: Trained) -> bool:
        """Bit for bit."""
        return self.bits() == other.bits()

    def bits(self) -> list[Any]:
        """All of it, to be compared with =="""
        arrays = [*(self.rows[name] for name in sorted(self.rows)), *self.dense]
        return [self.losses, self.norms, [array.tobytes() for array in arrays]]

    def distance(self, other: Trained) -> float:
        """The largest difference between two numbers of rows or dense parameters."""
        pairs = [*((self.rows[name], other.rows[name]) for name in self.rows), *zip(self.dense, other.dense)]
        return max(float(np.abs(a - b).max()) for a, b in pairs)


def train(
    model: Callable[[], nn.Module] = dlrm,
    batches: Callable[..., Iterator[Batch]] = clicks,
    *,
    device: str = "sim",
    steps: int = 6,
    world: World | None = None,
    change: Callable[[TrainPipeline], None] = lambda pipeline: None,
    optimizer: Any = None,
    **options: Any,
) -> Trained:
    """Trains a new model.  `change` may break the pipeline on purpose; `options` are those of `TrainPipeline`."""
    torch.manual_seed(3)
    world = world or World.single()
    made = model().to(device)
    torch.manual_seed(7 + world.rank)
    pipeline = TrainPipeline(
        made, torch.optim.SGD(made.parameters(), lr=0.1), optimizer or Adagrad(lr=0.1), world=world, **options
    )
    try:
        change(pipeline)
        if device == "sim":
            sim.reset_counts()
        data, losses, norms = batches(steps, world.rank), [], []
        while step := pipeline.progress(data):
            losses.append(step.loss)
            norms.append(step.grad_norm)
        pipeline.settle()
        keys = np.concatenate([np.arange(20), 1000 + np.arange(20)])
        tables = [table.name for group in pipeline.sparse.groups for table in group.tables]
        rows = {name: pipeline.rows(name, keys).numpy().copy() for name in tables}
        dense = [parameter.detach().cpu().numpy().copy() for parameter in made.parameters()]
        return Trained(losses, norms, rows, dense, pipeline.figures())
    finally:
        pipeline.close()


def in_order(order: str, seed: int = 0, **rules: Any) -> None:
    """From now on the simulated device runs in this order."""
    sim.enable()
    sim.configure(order, seed, **rules)  # type: ignore[arg-type]
