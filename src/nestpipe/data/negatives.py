"""How negatives are drawn: the keys `negatives`, `negatives_from` and `sampling` of [data], and the chances of items."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from nestpipe.data.checks import check_whole
from nestpipe.data.negatives_kernels import alias_table, draw

DrawnFor = Literal["each", "pool"]
Sampling = Literal["uniform", "log-uniform", "popularity", "in-batch"]


@dataclass(frozen=True)
class Negatives:
    """What [data] says of negatives; checked when it is made."""

    number: int = 0
    """For each target, or in the pool."""
    drawn_for: DrawnFor = "each"
    """each: for each target.  pool: once for a whole batch of all workers, for all its targets."""
    sampling: Sampling = "uniform"
    """uniform: any item of the catalogue.  popularity: as often as it occurs in training.  log-uniform: the item of
    popularity rank r (from 0) with the chance log((r + 2) / (r + 1)) / log(items + 1).  in-batch: a target of the batch."""

    def __post_init__(self) -> None:
        check_whole("negatives", self.number, 0)
        if self.drawn_for not in ("each", "pool"):
            raise ValueError(f"data.negatives_from must be 'each' or 'pool', not {self.drawn_for!r}")
        if self.sampling not in ("uniform", "log-uniform", "popularity", "in-batch"):
            raise ValueError(
                "data.sampling must be 'uniform', 'log-uniform', 'popularity' or 'in-batch', not " + repr(self.sampling)
            )
        if self.drawn_for == "pool" and not self.number:
            raise ValueError("data.negatives must be at least 1 with data.negatives_from = 'pool'")
        if self.sampling == "in-batch" and self.drawn_for != "pool":
            raise ValueError(
                "data.sampling = 'in-batch' draws from the targets of a whole batch: set data.negatives_from = 'pool'"
            )


@dataclass(frozen=True)
class Sampler:
    """Draws items of a catalogue by their chances, in the same time for any chances (alias tables)."""

    items: np.ndarray
    chances: np.ndarray
    """[items], sum 1.  Empty: all alike."""
    keep: np.ndarray
    alias: np.ndarray

    @staticmethod
    def of(items: np.ndarray, chances: np.ndarray | None = None) -> Sampler:
        if chances is None:
            return Sampler(items, np.empty(0), np.empty(0, np.uint64), np.empty(0, np.int64))
        if len(chances) != len(items) or not np.isfinite(chances).all() or (chances < 0).any() or not chances.sum() > 0:
            raise ValueError("a sampler needs a chance for each item, of at least 0, and not all 0")
        chances = np.asarray(chances, np.float64) / chances.sum()
        return Sampler(items, chances, *alias_table(chances))

    def draw(self, count: int, key: np.uint64) -> np.ndarray:
        out = np.empty(count, np.int64)
        draw(out, self.items, self.keep, self.alias, key)
        return out

    def log_chances(self) -> np.ndarray | None:
        """Of every item; one that is never drawn counts as the rarest that is.  None: all alike."""
        if not len(self.chances):
            return None
        return np.log(np.maximum(self.chances, self.chances[self.chances > 0].min()))


def chances_of(sampling: Sampling, counts: np.ndarray) -> np.ndarray | None:
    """The chance of each item, from how often it occurs in training.  None: all alike."""
    if sampling == "uniform":
        return None
    if sampling != "log-uniform":
        return counts / max(1, counts.sum())
    chances = np.empty(len(counts))
    rank = np.arange(len(counts))
    order = np.argsort(-counts, kind="stable")  # of equally popular items, the lower id first
    chances[order] = np.log1p(1 / (rank + 1)) / np.log(len(counts) + 1)
    return chances
