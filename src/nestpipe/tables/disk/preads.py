"""Bulk reads and writes of one file with a pool of threads, for systems that do not allow io_uring."""

from __future__ import annotations

import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from nestpipe.tables.disk.native import move_bytes

THREADS = 32
"""More than cores, because the threads mostly wait for the disk."""
_LEAST = 4
"""Fewest transfers worth waking a thread for."""


class Preads:
    """Transfers between one block of memory and a file, with the interface of `uring.Ring`."""

    name = "threads"

    def __init__(self, memory: np.ndarray, threads: int = THREADS) -> None:
        self._memory = memory
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "nestpipe-disk")
        self.close = weakref.finalize(self, self._pool.shutdown, wait=False)

    def transfer(
        self, writing: bool, fd: int, offsets: np.ndarray, lengths: np.ndarray, places: np.ndarray
    ) -> np.ndarray:
        """Same as `uring.Ring.transfer`."""
        addresses = places + self._memory.ctypes.data
        results = np.empty(len(offsets), np.int64)
        parts = max(1, min(self._threads, len(offsets) // _LEAST))
        ends = np.linspace(0, len(offsets), parts + 1).astype(np.int64)
        jobs = [
            self._pool.submit(move_bytes, writing, fd, offsets[a:b], lengths[a:b], addresses[a:b], results[a:b])
            for a, b in itertools.pairwise(ends.tolist())
        ]
        for job in jobs:
            job.result()
        return results
