"""Host memory for the arrays of a batch, reused as soon as nothing refers to it.

Several lanes allocate a few megabytes for every batch.  On the heap that costs page faults in every step, and fragments
the heap over days.  A block is free when no array and no tensor refers to it any more, so callers never return it.  A
user who keeps a view of a batch's rows keeps them unchanged.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import defaultdict

import numpy as np

LEAST_BYTES = 1 << 12
PATIENCE = 2_000
"""A block that has not been used for this many requests is freed: it served a peak, when several batches overlapped."""


class _Block:
    def __init__(self, size: int) -> None:
        self.array = np.empty(size, np.uint8)
        self.used_at = 0

    @property
    def free(self) -> bool:
        return sys.getrefcount(self.array) == _UNUSED


class ArrayPool:
    """Blocks of memory by size, powers of two.  Safe from any thread."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[_Block]] = defaultdict(list)
        self._requests = 0
        self._lock = threading.Lock()

    def take(self, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
        """An uninitialized array."""
        dtype = np.dtype(dtype)
        count = int(math.prod(shape))  # a dimension may be a numpy integer
        size = max(LEAST_BYTES, 1 << (count * dtype.itemsize - 1).bit_length()) if count else LEAST_BYTES
        with self._lock:
            self._requests += 1
            if self._requests % PATIENCE == 0:
                self._free_unused()
            # The first free block, so that later ones are used only at peaks and can be freed after them.
            block = next((block for block in self._blocks[size] if block.free), None)
            if block is None:
                block = _Block(size)
                self._blocks[size].append(block)
            block.used_at = self._requests
            return block.array[: count * dtype.itemsize].view(dtype).reshape(shape)

    @property
    def bytes(self) -> int:
        """The size of all blocks, in use or free."""
        with self._lock:
            return sum(size * len(blocks) for size, blocks in self._blocks.items())

    def _free_unused(self) -> None:
        for blocks in self._blocks.values():
            blocks[:] = [b for b in blocks if not b.free or b.used_at > self._requests - PATIENCE]


def _references() -> int:
    """What getrefcount returns for an array that only its block refers to."""
    block = _Block(1)
    return sys.getrefcount(block.array)


_UNUSED = _references()
