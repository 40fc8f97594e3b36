"""What `nestpipe bench gr` measures: operators over given lengths, and training steps on batches that are drawn once."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

Kind = Literal["hstu", "fuxi"]
ARRAYS = {"hstu": 14, "fuxi": 9}
"""Of all pairs that the peers' steps held at their highest, malloc tuned, which keeps most."""


@dataclass(frozen=True)
class OperatorWorkload:
    """Attention over histories of these lengths, forward and backward."""

    name: str
    kind: Kind
    """hstu: one channel, biases added to scores.  fuxi: FuXi-alpha's three channels."""
    heads: int
    lengths: tuple[int, ...]
    dim: int = 256
    timed: bool = True
    """False: only the memory of ours is measured, since nothing padded fits."""

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def padded_bytes(self) -> int:
        """About what padded torch needs: a dozen arrays of all pairs, for every head."""
        return 12 * 4 * len(self.lengths) * self.heads * max(self.lengths) ** 2 if self.timed else 0


@dataclass(frozen=True)
class StepWorkload:
    """Training steps of a next-item model.  Lengths are lognormal, items follow a power law."""

    name: str
    kind: Kind
    users: int
    max_length: int
    median_length: float
    dim: int
    blocks: int
    heads: int
    items: int
    steps: int
    """Timed in a turn."""
    sigma: float = 0.82
    least_length: int = 16
    negatives: int = 128
    dropout: float = 0.2
    temperature: float = 0.05
    batches: int = 4
    seed: int = 1

    @property
    def padded_bytes(self) -> int:
        """About what a step of a padded variant needs at most: so many arrays of all pairs, for every head and block."""
        return ARRAYS[self.kind] * 4 * self.users * self.heads * self.blocks * self.max_length**2

    @property
    def fill(self) -> float:
        """Tokens, as a share of those of padded histories.  The less, the more padded variants compute for nothing."""
        lengths = [self.draw(number)["lengths"] for number in range(self.batches)]
        return float(np.mean(lengths)) / self.max_length

    def draw(self, number: int) -> dict[str, np.ndarray]:
        """Batch `number`: lengths [B], and items and times of every history with the event after it, one after another."""
        rng = np.random.default_rng([self.seed, number])
        drawn = self.median_length * np.exp(self.sigma * rng.standard_normal(self.users))
        lengths = np.clip(drawn, self.least_length, self.max_length).astype(np.int64)
        events = int(lengths.sum()) + self.users
        items = (
            np.minimum(self.items ** rng.random(events), self.items).astype(np.int64) - 1
        )  # a power law of exponent 1
        times = np.concatenate([np.cumsum(rng.integers(1, 10_000, n + 1)) for n in lengths])
        return {"lengths": lengths, "items": items, "times": times}


def save_batches(workload: StepWorkload, path: Path) -> None:
    """Writes the batches of a workload to a file that every variant reads."""
    drawn = [workload.draw(number) for number in range(workload.batches)]
    save_arrays(path, {f"{name}{i}": array for i, batch in enumerate(drawn) for name, array in batch.items()})


def save_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    np.savez(path, **arrays)  # type: ignore[arg-type]  # mypy takes every key for an option


def read_batches(path: Path, count: int) -> list[dict[str, np.ndarray]]:
    with np.load(path) as stored:
        return [{name: stored[f"{name}{i}"] for name in ("lengths", "items", "times")} for i in range(count)]


def as_config(workload: OperatorWorkload | StepWorkload) -> dict[str, Any]:
    """For a JSON file from which `StepWorkload(**config)` or `OperatorWorkload(**config)` makes it again."""
    return asdict(workload)


LENGTHS = (2048, 2033, 1024, 1024)
LONG_LENGTHS = (8192, 6000, 4000, 8192)
CUT_LENGTHS = tuple(min(n, 4096) for n in LONG_LENGTHS)

OPERATORS = (
    OperatorWorkload("FuXi-alpha, 3 channels", "fuxi", 8, LENGTHS),
    OperatorWorkload("HSTU", "hstu", 4, LENGTHS),
    OperatorWorkload("FuXi-alpha, cut at 4,096", "fuxi", 8, CUT_LENGTHS, timed=False),
    OperatorWorkload("FuXi-alpha, cut at 8,192", "fuxi", 8, LONG_LENGTHS, timed=False),
)


def _like_ml_1m(name: str, kind: Kind) -> StepWorkload:
    """Lengths with a mean of about 116 after the cut at 200, as those of MovieLens-1M."""
    return StepWorkload(name, kind, 128, 200, 108.0, 50, 2, 1, 3_706, 2, sigma=0.95, least_length=20)


# Medians of the long rungs: padded FLOPs are 2.3 and 2.9 times the jagged ones, as in the measurements that our bars come from.
# Ratios to padded code grow with that.
STEPS = (
    _like_ml_1m("HSTU, as ML-1M", "hstu"),
    StepWorkload("HSTU, long", "hstu", 4, 2048, 1_500.0, 256, 4, 4, 20_000, 1),
    _like_ml_1m("FuXi-alpha, as ML-1M", "fuxi"),
    StepWorkload("FuXi-alpha, long", "fuxi", 3, 2048, 970.0, 256, 4, 8, 20_000, 1),
)
