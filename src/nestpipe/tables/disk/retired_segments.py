"""Segments that nobody owns any more but somebody may still be reading.

A read is told where its rows are and then takes its time.  Meanwhile rows may move, and segments that they leave are free; but
what lies in them must stay as it is until the read is over.
"""

from __future__ import annotations

import threading
from collections import deque


class RetiredSegments:
    """One read at a time begins and ends, one writer puts and takes.

    Whoever looks up places and then begins to read, and whoever moves rows and then puts what they left, must do both under one
    lock: then a read that begins after a `put` knows nothing of what was put.
    """

    def __init__(self) -> None:
        self._begun = 0
        self._ended = 0
        self._waiting: deque[tuple[int, int]] = deque()
        """Segments, each with the number of the last read that may know of it."""
        self._over = threading.Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self) -> None:
        with self._over:
            assert self._begun == self._ended, "one read at a time"
            self._begun += 1

    def end(self) -> None:
        with self._over:
            self._ended += 1
            self._over.notify_all()

    def put(self, segment: int) -> None:
        self._waiting.append((self._begun, segment))

    def take(self) -> list[int]:
        """All that no read can know of any more, in the order in which they came."""
        ended, free = self._ended, []
        while self._waiting and self._waiting[0][0] <= ended:
            free.append(self._waiting.popleft()[1])
        return free

    def wait(self) -> None:
        """Until the read that is on its way, if one is, is over."""
        with self._over:
            last = self._begun
            self._over.wait_for(lambda: self._ended >= last)
