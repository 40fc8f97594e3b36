"""Memory for what every batch needs anew: used again as soon as nobody holds it, not given back and asked for again.

Several lanes allocate a few megabytes each for every batch.  From the heap that is page faults in every step, and over days a
heap in pieces.  A block is free when no array and no tensor refers to it any more, so nobody has to give it back, and a user who
keeps a view of a batch's rows keeps them as they were.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import defaultdict

import numpy as np

LEAST_BYTES = 1 << 12
PATIENCE = 2_000
"""A block that nobody has asked for in so many requests is given back: it was needed once, when batches met by chance."""


class _Block:
    def __init__(self, size: int) -> None:
        self.array = np.empty(size, np.uint8)
        self.used_at = 0

    @property
    def free(self) -> bool:
        return sys.getrefcount(self.array) == _UNUSED


class ArrayPool:
    """Safe from any lane."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[_Block]] = defaultdict(list)
        self._requests = 0
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
        """An array with anything in it."""
        dtype = np.dtype(dtype)
        count = int(math.prod(shape))  # a dimension may be a number of numpy's
        size = max(LEAST_BYTES, 1 << (count * dtype.itemsize - 1).bit_length()) if count else LEAST_BYTES
        with self._lock:
            self._requests += 1
            if self._requests % PATIENCE == 0:
                self._give_back()
            # The first that is free, so that those behind it are used only when all before them are not.
            block = next((block for block in self._blocks[size] if block.free), None)
            if block is None:
                block = _Block(size)
                self._blocks[size].append(block)
            block.used_at = self._requests
            return block.array[: count * dtype.itemsize].view(dtype).reshape(shape)

    @property
    def bytes(self) -> int:
        """Held now, in use or free."""
        with self._lock:
            return sum(size * len(blocks) for size, blocks in self._blocks.items())

    def _give_back(self) -> None:
        for blocks in self._blocks.values():
            blocks[:] = [b for b in blocks if not b.free or b.used_at > self._requests - PATIENCE]


def _references() -> int:
    """What getrefcount says of an array that only its block holds."""
    block = _Block(1)
    return sys.getrefcount(block.array)


_UNUSED = _references()
