"""Data streams that are shared by other than one worker each, since the run began with other workers or a recipe says so.

A global batch is what all streams hand out at a time.  Their number stays what it was when the run began: that of its first
workers, or `train.streams`.  Each worker takes a run of the samples of one or some of them, so that every global batch has the
same samples in it whatever the number of workers, and no sample is lost or trained twice.  With as many workers as there are
streams, each has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from nestpipe.data.balance.loads import Loads
from nestpipe.data.balance.token_stream import TokenStream
from nestpipe.data.batch import Batch
from nestpipe.data.global_batches import GlobalBatches
from nestpipe.data.pool import Pool, with_pool
from nestpipe.data.source import Source, is_indexed
from nestpipe.data.stream import Position, Stream


@dataclass(frozen=True)
class Share:
    """Of every batch of a stream, the samples from first / parts to last / parts of it."""

    stream: int
    first: int
    last: int
    parts: int

    def bounds(self, samples: int) -> tuple[int, int]:
        """The first of so many samples that is in it, and the one after the last."""
        return samples * self.first // self.parts, samples * self.last // self.parts

    def of(self, batch: Batch) -> Batch:
        start, stop = self.bounds(len(batch))
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
    """One worker's batches, as `Stream` hands them out, of a run with `streams` data streams; None: one for each worker.

    `token_budget`: each stream fills its batches to so many tokens, whatever their number of samples (`TokenStream`).
    """

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
        token_budget: int | None = None,
    ) -> None:
        """`first`: how many global batches the run has handed out before `positions`."""
        self.source = source
        self.loads = Loads()
        self._handed_out = 0
        self.streams = workers if streams is None else streams
        self.shares = shares_of(rank, workers, self.streams)
        self._pool: Pool | None = getattr(source, "pool", None)
        self._batches = GlobalBatches(source.extent, source.piece, self.streams, batch_size, epochs)
        self._first = first
        at = positions or {}
        self._streams = {}
        for share in self.shares:
            where: Any = {"rank": share.stream, "workers": self.streams, "epochs": epochs}
            where["position"] = at.get(share.stream)
            if token_budget is None:
                self._streams[share.stream] = Stream(source, batch_size, **where)
            else:
                assert is_indexed(source)
                self._streams[share.stream] = TokenStream(source, token_budget, **where)

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
        number, self._handed_out = self._handed_out, self._handed_out + 1
        mine = Batch.concat(parts)
        if mine.costs is not None:
            self.loads.add(number, mine.costs.numpy())
        return with_pool(mine, self._pool, self._first + number, self._batches)

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
