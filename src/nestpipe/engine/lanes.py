"""Lanes: what runs at the same time.  On a CPU a lane is a thread whose work holds no GIL; on an accelerator a stream.

The compute lane is the caller's own thread, so that a user's model runs where the user called it from.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

CLOSE_SECONDS = 2.0


class LaneThread:
    """Runs jobs one after another in the order they were given.

    All lanes have one priority: one that yields is stopped with the GIL or a connection in its hands, and everybody waits for it
    (docs/log.md).
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"nestpipe-{name}", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """`job` must not raise."""
        self._jobs.put(job)

    def close(self) -> None:
        """Ends the thread after the jobs it has; waits a moment, since one that still runs when Python ends brings it down."""
        self._jobs.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
