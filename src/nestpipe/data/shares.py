"""Data streams that are shared by other than one worker each, since the run began with other workers or a recipe says so.

A global batch is what all streams hand out at a time.  Their number stays what it was when the run began: that of its first
workers, or `train.streams`.  Each worker takes a run of the samples of one or some of them, so that every global batch has the
same samples in it whatever the number of workers, and no sample is lost or trained twice.  With as many workers as there are
streams, each has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from nestpipe.data.batch import Batch
from nestpipe.data.global_batches import GlobalBatches
from nestpipe.data.pool import Pool
from nestpipe.data.source import Source
from nestpipe.data.stream import Position, Stream


@dataclass(frozen=True)
class Share:
    """Of every batch of a stream, the samples from first / parts to last / parts of it."""

    stream: int
    first: int
    last: int
    parts: int

    def of(self, batch: Batch) -> Batch:
        start, stop = (len(batch) * at // self.parts for at in (self.first, self.last))
        return batch if stop - start == len(batch) else batch.select(torch.arange(start, stop))


def shares_of(worker: int, workers: int, streams: int) -> list[Share]:
    """What `worker` of `workers` takes of `streams`: all of them together take every sample once."""
    start, stop = worker * streams, (worker + 1) * streams  # stream s is from s * workers to (s + 1) * workers
    found = []
    for stream in range(start // workers, -(-stop // workers)):
        first, last = max(start, stream * workers), min(stop, (stream + 1) * workers)
        found.append(Share(stream, first - stream * workers, last - stream * workers, workers))
    return found


class SharedStream:
    """One worker's batches, as `Stream` hands them out, of a run with `streams` data streams; None: one for each worker."""

    def __init__(
        self,
        source: Source,
        batch_size: int,
        *,
        rank: int = 0,
        workers: int = 1,
        streams: int | None = None,
        epochs: int | None = 1,
        positions: dict[int, Position] | None = None,
        first: int = 0,
    ) -> None:
        """`first`: how many global batches the run has handed out before `positions`."""
        self.source = source
        self.streams = workers if streams is None else streams
        self.shares = shares_of(rank, workers, self.streams)
        self._pool: Pool | None = getattr(source, "pool", None)
        self._batches = GlobalBatches(source.extent, source.piece, self.streams, batch_size, epochs)
        self._next = first
        at = positions or {}
        self._streams = {
            share.stream: Stream(
                source,
                batch_size,
                rank=share.stream,
                workers=self.streams,
                epochs=epochs,
                position=at.get(share.stream),
            )
            for share in self.shares
        }

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """A share without samples is still a batch: others have theirs of the same one."""
        parts = []
        for share in self.shares:
            batch = next(self._streams[share.stream], None)
            if batch is not None:
                parts.append(share.of(batch))
        if not parts:
            raise StopIteration
        number, self._next = self._next, self._next + 1
        batch = Batch.concat(parts)
        if self._pool is None:
            return batch
        return replace(batch, shared={self._pool.feature: torch.from_numpy(self._pool.ids(number, self._batches))})

    def positions_after(self, batches: int) -> dict[int, Position]:
        """Where each stream of this worker's goes on after so many batches."""
        return {number: stream.position_after(batches) for number, stream in self._streams.items()}

    @property
    def epoch(self) -> int:
        """The latest that a batch was handed out of."""
        return max(stream.position.epoch for stream in self._streams.values())

    def fraction(self) -> float:
        return min(stream.fraction() for stream in self._streams.values())

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
