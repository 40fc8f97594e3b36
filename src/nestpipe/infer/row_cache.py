"""Rows that were read lately, in a fixed number of slots: a second chance for each before it goes (CLOCK)."""

from __future__ import annotations

import numpy as np

from nestpipe.infer.block_kernels import evict
from nestpipe.infer.block_layout import BlockLayout
from nestpipe.keys import HashIndex
from nestpipe.keys.slab import Slab

_INDEX_BYTES = 34
"""Of a key: 10 for itself, up to 22 in the index, 2 of flags."""


class RowCache:
    """Rows as they are stored, by key; also keys known to have none.  One thread at a time."""

    def __init__(self, layout: BlockLayout, memory: int, most: int) -> None:
        """Takes at most `memory` bytes, and never more than `most` slots."""
        self.slots = max(1, min(memory // (_INDEX_BYTES + layout.row_bytes), most))
        self._index = HashIndex(self.slots + 1)
        self._values = Slab(layout.word, (layout.dim,), self.slots).rows
        self._scales = Slab(np.float32, (int(layout.scaled),), self.slots).rows
        self._there = np.zeros(self.slots, np.bool_)
        self._used = np.zeros(self.slots, np.uint8)
        self._hand = 0

    def __len__(self) -> int:
        return len(self._index)

    def nbytes(self) -> int:
        """Memory in use."""
        used = self._index.slots_used
        rows = used * (self._values.shape[1] * self._values.itemsize + 4 * self._scales.shape[1])
        return rows + self._index.nbytes() + self._there.nbytes + self._used.nbytes

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The slot of each key, -1 where it has none."""
        slots = self._index.find(keys)
        self._used[slots[slots >= 0]] = 1
        return slots

    def take(self, slots: np.ndarray, values: np.ndarray, scales: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Copies slots to these places.  Returns which of them are keys with a row."""
        values[places] = self._values[slots]
        if self._scales.shape[1]:
            scales[places] = self._scales[slots, 0]
        there: np.ndarray = self._there[slots]
        return there

    def put(self, keys: np.ndarray, values: np.ndarray, scales: np.ndarray, there: np.ndarray) -> None:
        """Keeps rows of keys that are not here, each once.  Slots found before may belong to other keys afterwards."""
        keys, values, there = keys[: self.slots], values[: self.slots], there[: self.slots]
        short = len(self._index) + len(keys) - self.slots
        if short > 0:
            gone = np.empty(short, np.int64)
            # Slots below `slots_used` all hold a key: freed ones are taken again right here.
            self._hand = evict(self._used, self._hand, short, self._index.slots_used, gone)
            self._index.delete(self._index.slot_keys.rows[gone])
        slots = self._index.insert(keys)
        self._values[slots] = values
        if self._scales.shape[1]:
            self._scales[slots, 0] = scales[: self.slots]
        self._there[slots] = there
        self._used[slots] = 0
