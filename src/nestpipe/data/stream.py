"""One worker's batches: its shard of a source, read ahead in the background, with a position to resume from."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from nestpipe.data.batch import Batch
from nestpipe.data.position import Position, fraction_done
from nestpipe.data.read_ahead import ReadAhead
from nestpipe.data.source import Source, shard

__all__ = ["Position", "Stream", "sample_ends"]


class Stream(ReadAhead[Position]):
    """Iterates the batches of one worker.  `position` is that of the batch handed out last, whatever was read ahead.

    A batch never spans two epochs; the last one of an epoch may be short.  `epochs=None` goes round for ever, unless an
    epoch has no sample for this worker.  A position is good for the same number of workers.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        rank: int = 0,
        workers: int = 1,
        epochs: int | None = 1,
        position: Position | None = None,
        read_ahead: int = 4,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        super().__init__(position or Position(), read_ahead)
        self.source = source
        self.batch_size = batch_size
        self.intervals = shard(source.extent, source.piece, workers, rank)
        self.epochs = epochs

    def fraction(self) -> float:
        """How much of all epochs has been handed out; 0 where the epochs never end."""
        return fraction_done(self.intervals, self.position, self.epochs)

    def _batches(self, at: Position) -> Iterator[tuple[Batch, Position]]:
        epoch = at.epoch
        while self.intervals and (self.epochs is None or epoch < self.epochs):
            start = at if epoch == at.epoch else Position(epoch)
            some = False
            for item in self._epoch(epoch, start):
                some = True
                yield item
            if not some and start == Position(epoch):
                return  # bytes without a line that begins there: going round would find nothing for ever
            epoch += 1

    def _epoch(self, epoch: int, at: Position) -> Iterator[tuple[Batch, Position]]:
        held: list[Batch] = []
        held_samples = 0
        now = at
        for number in range(at.interval, len(self.intervals)):
            start, stop = self.intervals[number]
            if number == at.interval and at.unit >= 0:
                start = at.unit
            for chunk, ends in self.source.read(start, stop, epoch):
                taken = 0
                while taken < len(chunk):
                    take = min(len(chunk) - taken, self.batch_size - held_samples)
                    whole = take == len(chunk)
                    held.append(chunk if whole else chunk.select(torch.arange(taken, taken + take)))
                    held_samples += take
                    taken += take
                    now = Position(epoch, number, int(ends[taken - 1]))
                    if held_samples == self.batch_size:
                        yield Batch.concat(held), now
                        held, held_samples = [], 0
        if held_samples:
            yield Batch.concat(held), now


def sample_ends(start: int, count: int) -> np.ndarray:
    """The `ends` of a chunk whose units are samples."""
    return np.arange(start + 1, start + count + 1)
