"""One worker's batches: its shard of a source, read ahead in the background, with a position to resume from."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields

import numpy as np
import torch

from nestpipe.data.batch import Batch
from nestpipe.data.source import Source, shard


@dataclass(frozen=True)
class Position:
    """Where a stream goes on: in `epoch`, in the `interval`-th interval of this worker's shard, at `unit`."""

    epoch: int = 0
    interval: int = 0
    unit: int = -1
    """-1: the start of the interval."""

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    @staticmethod
    def from_dict(values: object) -> Position:
        """ValueError unless it is what `as_dict` gives."""
        names = [f.name for f in fields(Position)]
        if not isinstance(values, Mapping) or sorted(values) != sorted(names):
            raise ValueError(f"a position has {', '.join(names)}, not {values!r}")
        position = Position(**values)
        if (
            not all(type(n) is int for n in values.values())
            or min(position.epoch, position.interval, position.unit + 1) < 0
        ):
            raise ValueError(f"no position: {values!r}")
        return position


class Stream:
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
        self.source = source
        self.batch_size = batch_size
        self.intervals = shard(source.extent, source.piece, workers, rank)
        self.epochs = epochs
        self.position = position or Position()
        self._queue: queue.Queue[tuple[Batch, Position] | BaseException | None] = queue.Queue(max(1, read_ahead))
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._ended = False
        self._handed_out = 0
        self._passed: deque[Position] = deque([self.position])
        """Positions from that after the last batch asked about, by `position_after`, to that after the last one handed out."""

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._ended:
            raise StopIteration
        if self._thread is None:
            self._thread = threading.Thread(target=self._fill, name="nestpipe-read-ahead", daemon=True)
            self._thread.start()
        item = self._queue.get()
        if item is None or isinstance(item, BaseException):
            self._ended = True
            if item is None:
                raise StopIteration
            raise item
        batch, self.position = item
        self._handed_out += 1
        self._passed.append(self.position)
        return batch

    def position_after(self, batches: int) -> Position:
        """The position after so many batches of this stream, the last one's where it had fewer.  Asked for rising numbers: what a
        pipeline has read ahead is not trained yet."""
        first = self._handed_out - len(self._passed) + 1
        while first < batches and len(self._passed) > 1:
            self._passed.popleft()
            first += 1
        return self._passed[0]

    def fraction(self) -> float:
        """How much of all epochs has been handed out; 0 where the epochs never end."""
        total = sum(stop - start for start, stop in self.intervals)
        if not total or not self.epochs:
            return 0.0
        at = self.position
        done = sum(stop - start for start, stop in self.intervals[: at.interval])
        if at.unit >= 0:
            done += min(at.unit, self.intervals[at.interval][1]) - self.intervals[at.interval][0]
        return (at.epoch + done / total) / self.epochs

    def close(self) -> None:
        """Stops reading ahead.  Further batches are not handed out."""
        self._closing.set()
        self._ended = True
        if self._thread is not None:
            while self._thread.is_alive():
                try:
                    self._queue.get_nowait()
                except queue.Empty:
                    self._thread.join(0.01)
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(
                    None
                )  # whoever is waiting for a batch on another thread learns that there is none

    def _put(self, item: tuple[Batch, Position] | BaseException | None) -> bool:
        while not self._closing.is_set():
            try:
                self._queue.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def _fill(self) -> None:
        try:
            for item in self._batches(self.position):
                if not self._put(item):
                    return
            self._put(None)
        except BaseException as error:  # handed to the consumer, who raises it in its own thread
            self._put(error)

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
