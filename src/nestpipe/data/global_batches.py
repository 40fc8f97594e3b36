"""Which units every global batch has: known to every worker by arithmetic, where a unit is a sample."""

from __future__ import annotations

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
        for stream in range(self.streams):
            intervals = shard(self.extent, self.piece, self.streams, stream)
            samples = sum(stop - start for start, stop in intervals)
            batches = -(-samples // self.batch_size)
            if not batches or (self.epochs is not None and number // batches >= self.epochs):
                continue
            first = number % batches * self.batch_size
            wanted = np.arange(first, min(first + self.batch_size, samples))
            starts = np.array([start for start, _ in intervals])
            before = np.cumsum([0, *(stop - start for start, stop in intervals)])
            interval = np.searchsorted(before, wanted, side="right") - 1
            found.append((number // batches, starts[interval] + wanted - before[interval]))
        return found
