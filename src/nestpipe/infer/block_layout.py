"""Rows in blocks, sorted by the hash of their key: the file of a table in an export for serving.

A block is a checksum, keys, scales (int8 only) and values, each side by side, and padding.  All blocks are full but the last.
A key's hash is a bijection, so keys of a table have no ties, and hashes are uniform.  The first hash of every block, the
fences, is in memory: a key, there or not, costs one read of one block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

Stored = Literal["float64", "float32", "float16", "int8"]
"""How values lie in a file.  int8 has a scale for each row."""
STORED: tuple[Stored, ...] = get_args(Stored)
_WORDS = {"float64": np.uint64, "float32": np.uint32, "float16": np.uint16, "int8": np.uint8}
SECTOR = 4096
"""Blocks are multiples of it: what a disk reads at once."""
_CHECK_BYTES = 8
_MOST_SECTORS = 16
_MOST_WASTE = 0.2


@dataclass(frozen=True)
class Blocks:
    """Some blocks in memory, as arrays without a copy."""

    words: np.ndarray
    """uint64 [n, block / 8]; column 0 is the checksum of the others."""
    keys: np.ndarray
    """int64 [n, R]"""
    scales: np.ndarray
    """float32 [n, R]; [n, 0] but for int8."""
    values: np.ndarray
    """[n, R, dim], unsigned integers as wide as the numbers."""


@dataclass(frozen=True)
class BlockLayout:
    """Where everything lies in a block of rows of `dim` numbers."""

    dim: int
    stored: Stored

    @property
    def row_bytes(self) -> int:
        """Of a row with its key."""
        return 8 + 4 * self.scaled + self.dim * self.word.itemsize

    @property
    def scaled(self) -> bool:
        return self.stored == "int8"

    @property
    def word(self) -> np.dtype:
        return np.dtype(_WORDS[self.stored])

    @property
    def block_bytes(self) -> int:
        """The least number of sectors that wastes little, or that holds a row."""
        least = -(-(self.row_bytes + _CHECK_BYTES) // SECTOR)
        for sectors in range(least, max(least, _MOST_SECTORS) + 1):
            size = sectors * SECTOR
            used = _CHECK_BYTES + (size - _CHECK_BYTES) // self.row_bytes * self.row_bytes
            if used >= (1 - _MOST_WASTE) * size:
                return size
        return least * SECTOR

    @property
    def rows(self) -> int:
        """In a full block."""
        return (self.block_bytes - _CHECK_BYTES) // self.row_bytes

    def blocks_of(self, rows: int) -> int:
        return -(-rows // self.rows)

    def view(self, memory: np.ndarray) -> Blocks:
        """Blocks that lie one after another in memory (uint8, aligned to 8)."""
        size, each, item = self.block_bytes, self.rows, self.word.itemsize
        count = len(memory) // size
        flat = memory[: count * size]

        def part(at: int, dtype: np.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
            whole: np.ndarray = np.ndarray(
                (count, *shape), dtype, flat.data if count else b"", at * (count > 0), (size, *strides)
            )
            return whole

        scales_at = _CHECK_BYTES + 8 * each
        values_at = scales_at + 4 * each * self.scaled
        return Blocks(
            flat.view(np.uint64).reshape(count, size // 8),
            part(_CHECK_BYTES, np.dtype(np.int64), (each,), (8,)),
            part(scales_at, np.dtype(np.float32), (each * self.scaled,), (4,)),
            part(values_at, self.word, (each, self.dim), (item * self.dim, item)),
        )
