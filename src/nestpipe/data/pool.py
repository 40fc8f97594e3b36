"""Negatives that all positions of a global batch have in common.

A pool depends on the seed and on the number of the batch, counted from the start of the run: it is the same on every
worker, in every micro-batch and after a resume, and nothing is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from nestpipe.data.batch import Batch
from nestpipe.data.counter import derive
from nestpipe.data.global_batches import GlobalBatches
from nestpipe.data.negatives import Sampler
from nestpipe.data.negatives_kernels import draw_places


class Pool(Protocol):
    @property
    def feature(self) -> str:
        """The feature whose ids these are."""

    def ids(self, number: int, batches: GlobalBatches) -> np.ndarray:
        """The pool of global batch `number`."""


def with_pool(batch: Batch, pool: Pool | None, number: int, batches: GlobalBatches) -> Batch:
    """The batch with the pool of its number, where there is one."""
    if pool is None:
        return batch
    return replace(batch, shared={pool.feature: torch.from_numpy(pool.ids(number, batches))})


@dataclass(frozen=True)
class CataloguePool:
    """Drawn from the catalogue."""

    sampler: Sampler
    size: int
    seed: int
    feature: str = "negatives"

    def ids(self, number: int, batches: GlobalBatches) -> np.ndarray:
        return self.sampler.draw(self.size, derive(self.seed, "pool", number))


class TargetPool:
    """Drawn from the targets of the global batch itself, every target with the same chance."""

    feature = "negatives"

    def __init__(
        self,
        order: Callable[[int], np.ndarray],
        stops: np.ndarray,
        counts: np.ndarray,
        items: np.ndarray,
        size: int,
        seed: int,
    ) -> None:
        """`order(epoch)`: the user of every unit.  User u has the targets items[stops[u] - counts[u] : stops[u]]."""
        self._order = functools.lru_cache(maxsize=2)(order)  # epochs of streams may drift apart
        self._stops, self._counts, self._items = stops, counts, items
        self._size, self._seed = size, seed

    def ids(self, number: int, batches: GlobalBatches) -> np.ndarray:
        parts = [self._order(epoch)[units] for epoch, units in batches.units(number)]
        users = np.concatenate([np.empty(0, np.int64), *parts])
        ends = np.cumsum(self._counts[users])
        if not len(ends) or not ends[-1]:
            return np.empty(0, np.int64)
        places = draw_places(self._size, int(ends[-1]), derive(self._seed, "pool", number))
        user = np.searchsorted(ends, places, side="right")
        return self._items[self._stops[users[user]] - (ends[user] - places)]
