"""Retired segments: no row is in them any more, but a read may still be using them.

A read looks up the places of its rows first and reads them later.  In between, rows may move and leave their segments
empty.  The bytes of these segments must stay until the read ends.
"""

from __future__ import annotations

import threading
from collections import deque


class RetiredSegments:
    """Used by one reader, one read at a time, and one writer.

    The reader must look up places and call `begin_read` under one lock, and the writer must move rows and call `retire`
    under the same lock.  Then a read that begins after `retire` does not use the retired segment.
    """

    def __init__(self) -> None:
        self._begun = 0
        self._ended = 0
        self._waiting: deque[tuple[int, int]] = deque()
        """(number of the last read that may use the segment, segment)."""
        self._read_ended = threading.Condition()

    def __len__(self) -> int:
        return len(self._waiting)

    def begin_read(self) -> None:
        with self._read_ended:
            assert self._begun == self._ended, "one read at a time"
            self._begun += 1

    def end_read(self) -> None:
        with self._read_ended:
            self._ended += 1
            self._read_ended.notify_all()

    def retire(self, segment: int) -> None:
        self._waiting.append((self._begun, segment))

    def reclaim(self) -> list[int]:
        """Removes and returns the segments that no read can be using, in the order in which they were retired."""
        ended, free = self._ended, []
        while self._waiting and self._waiting[0][0] <= ended:
            free.append(self._waiting.popleft()[1])
        return free

    def wait_for_read(self) -> None:
        """Waits until the current read, if any, has ended."""
        with self._read_ended:
            last = self._begun
            self._read_ended.wait_for(lambda: self._ended >= last)
