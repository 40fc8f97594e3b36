"""Which units every global batch has: known to every worker by arithmetic, where a unit is a sample."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from nestpipe.data.source import shard


@dataclass(frozen=True)
class GlobalBatches:
    """Of a run with `streams` data streams.  A global batch is what all of them hand out at a time."""

    extent: int
    piece: int
    streams: int
    batch_size: int
    epochs: int | None

    def units(self, number: int) -> list[tuple[int, np.ndarray]]:
        """(epoch, units in the order of reading) of each stream in global batch `number`; no stream that has ended.

        Streams may differ by a sample, and so by a batch an epoch: then their epochs drift apart.
        """
        found = []
        for starts, before in self._intervals:
            samples = int(before[-1])
            batches = -(-samples // self.batch_size)
            if not batches or (self.epochs is not None and number // batches >= self.epochs):
                continue
            first = number % batches * self.batch_size
            wanted = np.arange(first, min(first + self.batch_size, samples))
            interval = np.searchsorted(before, wanted, side="right") - 1
            found.append((number // batches, starts[interval] + wanted - before[interval]))
        return found

    @functools.cached_property
    def _intervals(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per stream: where its intervals start, and how many samples are before each, and in all."""
        found = []
        for stream in range(self.streams):
            edges = np.array(shard(self.extent, self.piece, self.streams, stream), np.int64).reshape(-1, 2)
            found.append((edges[:, 0], np.concatenate([[0], np.cumsum(edges[:, 1] - edges[:, 0])])))
        return found
