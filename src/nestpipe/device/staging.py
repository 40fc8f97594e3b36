"""Page-locked host memory between host and device, reused as soon as the copy that it serves has passed."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64
LEAST_BYTES = 1 << 12
MOST_PENDING = 8
"""Blocks of one size whose copies have not passed.  A host that is so far ahead waits for the oldest."""


class Block:
    """One allocation, and the event of the copy that still uses it."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.event: Any = None

    @property
    def free(self) -> bool:
        return self.event is None or self.event.query()


class Staging:
    """Blocks by size, powers of two.  Safe from any thread."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self._allocate = allocate
        self._blocks: dict[int, list[Block]] = defaultdict(list)
        self._lock = threading.Lock()
        self.bytes = 0

    def take(self, nbytes: int) -> Block:
        size = max(LEAST_BYTES, 1 << max(0, nbytes - 1).bit_length())
        with self._lock:
            waiting = self._blocks[size]
            at = next((i for i, block in enumerate(waiting) if block.free), None)
            if at is None and len(waiting) >= MOST_PENDING:
                waiting[0].event.synchronize()
                at = 0
            if at is not None:
                block = waiting.pop(at)
                block.event = None
                return block
            self.bytes += size
        return Block(self._allocate(size))

    def give_back(self, block: Block, event: Any = None) -> None:
        """`event`: the block may be used again once it has passed.  None: at once."""
        block.event = event
        with self._lock:
            self._blocks[block.memory.numel()].append(block)


def places_of(shapes: Sequence[tuple[tuple[int, ...], np.dtype]]) -> tuple[list[tuple[int, int]], int]:
    """(begin, bytes) of arrays that lie one after another in one block, and the size of the block."""
    places, at = [], 0
    for shape, dtype in shapes:
        nbytes = int(math.prod(shape)) * dtype.itemsize
        places.append((at, nbytes))
        at += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return places, at


def views_of(block: Tensor, shapes: Sequence[tuple[tuple[int, ...], np.dtype]]) -> list[np.ndarray]:
    """The arrays of these shapes that lie one after another in host memory."""
    memory = block.numpy()
    places, _ = places_of(shapes)
    return [memory[at : at + n].view(dtype).reshape(shape) for (at, n), (shape, dtype) in zip(places, shapes)]


TORCH_DTYPES: dict[np.dtype, torch.dtype] = {
    np.dtype(name): getattr(torch, name)
    for name in ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
}
NUMPY_DTYPES = {there: here for here, there in TORCH_DTYPES.items()}
