"""Memory for what every batch needs anew: used again as soon as nobody holds it, not given back and asked for again.

Several lanes allocate a few megabytes each for every batch.  From the heap that is page faults in every step, and over days a
heap in pieces.  A block is free when no array and no tensor refers to it any more, so nobody has to give it back, and a user who
keeps a view of a batch's rows keeps them as they were.
"""

from __future__ import annotations

import sys
import threading
from collections import defaultdict

import numpy as np

LEAST_BYTES = 1 << 12
PATIENCE = 2_000
"""A size that nobody asked for in so many requests is given back."""


class Blocks:
    """Safe from any lane."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[np.ndarray]] = defaultdict(list)
        self._asked: dict[int, int] = {}
        self._requests = 0
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
        """An array with anything in it."""
        dtype = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        size = max(LEAST_BYTES, 1 << (count * dtype.itemsize - 1).bit_length()) if count else LEAST_BYTES
        with self._lock:
            self._requests += 1
            self._asked[size] = self._requests
            block = self._free(self._blocks[size])
            if block is None:
                self._drop_old()
                block = np.empty(size, np.uint8)
                self._blocks[size].append(block)
        return block[: count * dtype.itemsize].view(dtype).reshape(shape)

    @property
    def bytes(self) -> int:
        """Held now, in use or free."""
        with self._lock:
            return sum(size * len(blocks) for size, blocks in self._blocks.items())

    def _free(self, blocks: list[np.ndarray]) -> np.ndarray | None:
        for i in range(len(blocks)):
            if sys.getrefcount(blocks[i]) == _UNUSED:
                return blocks[i]
        return None

    def _drop_old(self) -> None:
        """Gives back blocks of sizes that are no longer asked for."""
        for size, blocks in self._blocks.items():
            if self._asked[size] < self._requests - PATIENCE:
                blocks[:] = [blocks[i] for i in range(len(blocks)) if sys.getrefcount(blocks[i]) != _UNUSED]


def _references() -> int:
    """What getrefcount says of a block that only its list holds."""
    blocks = [np.empty(1, np.uint8)]
    return sys.getrefcount(blocks[0])


_UNUSED = _references()
