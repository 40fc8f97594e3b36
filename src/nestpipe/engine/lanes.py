"""Lanes: what runs at the same time.  On a CPU a lane is a thread whose work holds no GIL; on an accelerator a stream.

The compute lane is the caller's own thread, so that a user's model runs where the user called it from.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable

from nestpipe.device import compute_threads

CLOSE_SECONDS = 2.0
NICENESS = 6
"""A fifth of a core that others want, too.  A tenth (10) is less than 6,000 cold rows a step need: `retrieve` came too late."""


class LaneThread:
    """Runs jobs one after another in the order they were given.

    A lane that yields to others on busy cores must hold nothing that they need: stopped with the GIL or a connection in its
    hands, it makes everybody wait (docs/log.md).  So none does but storage and writeback, where rows are on disk, which are
    mostly in the kernel.
    """

    def __init__(self, name: str, yields: bool = False) -> None:
        self._yields = yields
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
        compute_threads.join()
        if self._yields and sys.platform == "linux":  # where a priority is a thread's own, not its process's
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + NICENESS)
        while (job := self._jobs.get()) is not None:
            job()
