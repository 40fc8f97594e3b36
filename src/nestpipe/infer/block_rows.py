"""Rows of one table from blocks in a file: through the page cache, or past it with a cache of bounded size."""

from __future__ import annotations

import threading

import numpy as np

from nestpipe.infer.block_file import BlockFile
from nestpipe.infer.block_kernels import blocks_with, copy_rows
from nestpipe.infer.block_layout import Blocks
from nestpipe.infer.quantise import decode
from nestpipe.infer.row_cache import RowCache
from nestpipe.keys import dedup


class _Raw:
    """Rows as they are stored, and which keys have one."""

    def __init__(self, file: BlockFile, count: int) -> None:
        layout = file.layout
        self.values = np.empty((count, layout.dim), layout.word)
        self.scales = np.empty(count if layout.scaled else 0, np.float32)
        self.there = np.zeros(count, np.bool_)


class MappedBlocks:
    """All blocks memory-mapped.  The operating system keeps in memory what is read often, and drops it when it needs room.

    A block is read and checked when it is first needed.  After that it is trusted; if it was dropped and the disk fails then,
    the process ends (SIGBUS).  Any thread.
    """

    def __init__(self, file: BlockFile, fences: np.ndarray, rows: int) -> None:
        self.file, self._fences, self._rows = file, fences, rows
        self._blocks = file.mapped()
        self._checked = np.zeros(file.blocks, np.bool_)
        self._lock = threading.Lock()

    def read(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values of every key, and which have a row; of the others anything."""
        blocks = np.empty(len(keys), np.int64)
        blocks_with(self._fences, keys, blocks)
        new = blocks[blocks >= 0]
        new = new[~self._checked[new]]
        if len(new):
            self._check(np.unique(new))
        raw = _Raw(self.file, len(keys))
        there = _copy(self._blocks, self._rows, keys, blocks, blocks, raw)
        return decode(raw.values, raw.scales, self.file.layout.stored), there

    def _check(self, numbers: np.ndarray) -> None:
        """Reads blocks many at a time, which also brings them into the page cache: a fault for each would take far longer."""
        with self._lock:
            for at in range(0, len(numbers), self.file.most):
                part = numbers[at : at + self.file.most]
                self.file.read(part)
                self._checked[part] = True

    def forget_checks(self) -> None:
        """Every block is read and checked again when it is next needed."""
        self._checked[:] = False

    def nbytes(self) -> int:
        """Memory that only this process can give back."""
        return self._fences.nbytes + self._checked.nbytes

    def close(self) -> None:
        self.file.close()


class CachedBlocks:
    """Blocks on disk, read directly; rows that were read lately in `memory` bytes.  Any thread, one after another."""

    def __init__(self, file: BlockFile, fences: np.ndarray, rows: int, memory: int) -> None:
        self.file, self._fences, self._rows = file, fences, rows
        # A key that has no row takes a slot, too.
        self._cache = RowCache(file.layout, memory - fences.nbytes, 2 * rows + 1024)
        self._lock = threading.Lock()

    def read(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values of every key, and which have a row; of the others anything."""
        raw = _Raw(self.file, len(keys))
        with self._lock:
            slots = self._cache.find(keys)
            hits, misses = np.flatnonzero(slots >= 0), np.flatnonzero(slots < 0)
            raw.there[hits] = self._cache.take(slots[hits], raw.values, raw.scales, hits)
            if len(misses):
                unique, inverse = dedup(keys[misses])
                fetched = self._fetch(unique)
                self._cache.put(unique, fetched.values, fetched.scales, fetched.there)
                raw.values[misses] = fetched.values[inverse]
                raw.there[misses] = fetched.there[inverse]
                if len(raw.scales):
                    raw.scales[misses] = fetched.scales[inverse]
        return decode(raw.values, raw.scales, self.file.layout.stored), raw.there

    def _fetch(self, keys: np.ndarray) -> _Raw:
        raw = _Raw(self.file, len(keys))
        blocks = np.empty(len(keys), np.int64)
        blocks_with(self._fences, keys, blocks)
        order = np.argsort(blocks, kind="stable")
        order = order[np.searchsorted(blocks[order], 0) :]
        numbers, starts = np.unique(blocks[order], return_index=True)
        ends = np.append(starts[1:], len(order))
        for at in range(0, len(numbers), self.file.most):
            stop = min(at + self.file.most, len(numbers))
            mine = order[starts[at] : ends[stop - 1]]
            read = self.file.read(numbers[at:stop])
            part = _Raw(self.file, len(mine))
            places = np.searchsorted(numbers[at:stop], blocks[mine])
            raw.there[mine] = _copy(read, self._rows, keys[mine], blocks[mine], places, part)
            raw.values[mine] = part.values
            if len(raw.scales):
                raw.scales[mine] = part.scales
        return raw

    def nbytes(self) -> int:
        """Memory in use: fences, cache."""
        return self._fences.nbytes + self._cache.nbytes()

    def close(self) -> None:
        self.file.close()


def _copy(
    blocks: Blocks, rows: int, keys: np.ndarray, numbers: np.ndarray, places: np.ndarray, raw: _Raw
) -> np.ndarray:
    there: np.ndarray = copy_rows(
        blocks.keys, blocks.scales, blocks.values, rows, keys, numbers, places, raw.values, raw.scales
    )
    return there
