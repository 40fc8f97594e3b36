"""Small data and small models for tests: samples as plain Python values, cut into global batches and shards.

A global batch is the same whatever the number of workers; a shard is one worker's part of it.  So one oracle serves them all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from nestpipe.config.eviction import EvictionPolicy
from nestpipe.data.batch import Batch
from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.models.dlrm import DLRM, DLRMConfig
from nestpipe.models.fuxi import FuXi, FuXiConfig
from nestpipe.models.hstu import HSTU, HSTUConfig
from nestpipe.tables.config import TableDefaults

SEQUENCES = ("hstu", "fuxi-alpha", "fuxi-beta", "fuxi-gamma")
MODELS = ("dlrm", *SEQUENCES)
FEATURES = {
    "dlrm": ["user", "item", "tags", "rare"],
    **{name: ["history", "target", "negatives", "time"] for name in SEQUENCES},
}
DENSE = 3
MAX_LENGTH = 7
NEGATIVES = 3


@dataclass(frozen=True)
class Sample:
    ids: dict[str, list[int]]
    dense: list[float] = field(default_factory=list)
    label: float = 0.0
    terms: int = 1
    """Loss terms of this sample."""


def drawn(name: str, steps: int, seed: int = 0, samples: int = 11) -> list[list[Sample]]:
    """Global batches: most of about `samples` samples, the third of one sample only (with more than two steps)."""
    random = np.random.default_rng([seed, len(name)])
    draw = _click if name == "dlrm" else _sequence
    sizes = [1 if step == 2 else int(random.integers(samples - 3, samples + 4)) for step in range(steps)]
    vocabulary = _vocabulary(seed)
    return [[draw(random, vocabulary) for _ in range(size)] for size in sizes]


def _vocabulary(seed: int) -> np.ndarray:
    """Keys of any size and sign, among them the extremes."""
    keys = np.random.default_rng(seed + 99).integers(-(2**63), 2**63 - 1, 60, dtype=np.int64)
    keys[:4] = [0, -1, 2**63 - 1, -(2**63)]
    return keys


def _click(random: np.random.Generator, keys: np.ndarray) -> Sample:
    def some(count: int, first: int, stop: int) -> list[int]:
        # a power law: hot keys are in every batch, cold ones come back after a while
        places = first + ((stop - first) * random.random(count) ** 2).astype(int)
        return [int(k) for k in keys[places]]

    ids = {
        "user": some(1, 0, 30),
        "item": some(1, 20, 50),
        "tags": some(int(random.integers(0, 6)), 0, 25),  # ragged, some bags are empty
        "rare": some(int(random.random() < 0.15), 0, 8),  # often empty in a whole micro-batch
    }
    return Sample(ids, random.normal(size=DENSE).tolist(), float(random.random() < 0.4))


def _sequence(random: np.random.Generator, keys: np.ndarray) -> Sample:
    n = int(random.integers(1, MAX_LENGTH + 1))
    items = keys[(len(keys) * random.random(n + 1) ** 1.5).astype(int)]
    times = 1_600_000_000 + np.cumsum((10 ** (7 * random.random(n + 1))).astype(np.int64))
    ids = {
        "history": items[:-1].tolist(),
        "target": items[1:].tolist(),
        "negatives": random.choice(keys, n * NEGATIVES).tolist(),
        "time": times.tolist(),
    }
    return Sample(ids, terms=n)


def batch(name: str, samples: list[Sample], dtype: str = "float32") -> Batch:
    """The samples as a model takes them; there may be none."""
    features = FEATURES[name]
    lengths = [len(s.ids[f]) for f in features for s in samples]
    values = [i for f in features for s in samples for i in s.ids[f]]
    jagged = KeyedJaggedTensor(
        features,
        torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        stride=len(samples),
    )
    if name != "dlrm":
        return Batch(jagged, loss_terms=torch.tensor([s.terms for s in samples], dtype=torch.int64))
    dense = torch.tensor([s.dense for s in samples], dtype=getattr(torch, dtype)).view(len(samples), DENSE)
    return Batch(jagged, dense, torch.tensor([s.label for s in samples], dtype=getattr(torch, dtype)))


def shard(steps: list[list[Sample]], rank: int, workers: int) -> list[list[Sample]]:
    """Worker `rank`'s parts of global batches, uneven on purpose.

    In step 1 the last worker has an empty batch, in step 2 all but one have (a global batch of one sample), and with three or
    more steps the last worker's data ends two steps before the others'.
    """
    mine = []
    for step, everything in enumerate(steps):
        count = len(everything)
        takers = workers if workers == 1 or (step != 1 and step < len(steps) - 2) else workers - 1
        # weights 1, 2, 3... turned round with the step: nobody's share is always the smallest
        weights = [1 + (step + r) % takers for r in range(takers)]
        ends = [count * sum(weights[: r + 1]) // sum(weights) for r in range(takers)]
        if rank < takers:
            mine.append(everything[ends[rank - 1] if rank else 0 : ends[rank]])
        elif step < len(steps) - 2:
            mine.append([])
    return mine


def model(name: str, dtype: str, seed: int = 0, life: EvictionPolicy | None = None) -> nn.Module:
    """A small model without dropout; tables and dense part have the same dtype."""
    torch.manual_seed(seed)
    made: nn.Module
    if name == "dlrm":
        tables = TableDefaults(dtype, "uniform", 0.5, life)
        made = DLRM(DLRMConfig(dim=4, bottom=[5], top=[6], pooling="mean"), FEATURES["dlrm"], DENSE, tables)
    else:
        tables = TableDefaults(dtype, "normal", 0.5, life)
        common: dict[str, Any] = dict(dim=6, blocks=2, heads=2, max_length=MAX_LENGTH, dropout=0.0, temperature=0.2)
        if name == "hstu":
            made = HSTU(HSTUConfig(**common), tables)
        else:
            made = FuXi(FuXiConfig(**common, variant=name.split("-")[1], time_unit=50.0), tables)
    return made.to(getattr(torch, dtype))


def tables(name: str) -> list[str]:
    return FEATURES["dlrm"] if name == "dlrm" else ["item"]


def keys_of(name: str, steps: list[list[Sample]]) -> dict[str, np.ndarray]:
    """Every key of every table that these global batches touch, ascending."""
    looked_up = {t: [t] for t in tables(name)} if name == "dlrm" else {"item": FEATURES[name][:3]}
    return {
        table: np.array(sorted({i for step in steps for s in step for f in features for i in s.ids[f]}), np.int64)
        for table, features in looked_up.items()
    }
