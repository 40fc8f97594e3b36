"""Batches that a thread makes ahead of those that are handed out, each with the position after it."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from nestpipe.data.batch import Batch

P = TypeVar("P")


class ReadAhead(Generic[P]):
    """Iterates batches.  `position` is that after the batch handed out last, whatever was read ahead.

    A subclass has `_batches(at)`, which runs on the thread.
    """

    def __init__(self, position: P, read_ahead: int = 4) -> None:
        self.position = position
        self._queue: queue.Queue[tuple[Batch, P] | BaseException | None] = queue.Queue(max(1, read_ahead))
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._ended = False
        self._handed_out = 0
        self._passed: deque[P] = deque([position])
        """Positions from that after the last batch asked about, by `position_after`, to that after the last one handed out."""

    def _batches(self, at: P) -> Iterator[tuple[Batch, P]]:
        """All batches from a position on, each with the position after it."""
        raise NotImplementedError

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

    def position_after(self, batches: int) -> P:
        """The position after so many batches of this stream, the last one's where it had fewer.  Asked for rising numbers: what a
        pipeline has read ahead is not trained yet."""
        first = self._handed_out - len(self._passed) + 1
        while first < batches and len(self._passed) > 1:
            self._passed.popleft()
            first += 1
        return self._passed[0]

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

    def _put(self, item: tuple[Batch, P] | BaseException | None) -> bool:
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
