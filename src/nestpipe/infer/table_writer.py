"""Writes the blocks of one table, front to back, from rows in the order of their hashes."""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path

import numpy as np

from nestpipe.checkpoint.tensors import write_tensors
from nestpipe.infer.block_kernels import hashes_of, seal_blocks
from nestpipe.infer.block_layout import BlockLayout, Stored
from nestpipe.infer.quantise import RowChange, decode, encode
from nestpipe.infer.serving_files import ServingTable

PART_BYTES = 1 << 24
"""Blocks are made so many at a time."""


class TableWriter:
    """`add` rows in ascending order of their hash, then `finish`.  Holds less than a block, and the fences."""

    def __init__(self, directory: Path, number: int, name: str, dim: int, dtype: str, stored: Stored) -> None:
        self._directory, self._number, self._name, self._dtype = directory, number, name, dtype
        self._layout = BlockLayout(dim, stored)
        self._file = f"table{number:05d}.rows"
        self._salt = secrets.randbits(62)
        self._keys = np.empty(0, np.int64)
        self._values = np.empty((0, dim), np.dtype(dtype))
        self._fences: list[np.ndarray] = []
        self._blocks = self._rows = 0
        self.change = RowChange()
        (directory / self._file).touch(exist_ok=False)

    def add(self, keys: np.ndarray, values: np.ndarray) -> None:
        self._keys = np.concatenate([self._keys, keys])
        self._values = np.concatenate([self._values, values])
        self._write(len(self._keys) // self._layout.rows * self._layout.rows)

    def finish(self) -> ServingTable:
        """The last block, which may be short, and the fences; all on disk when it returns."""
        self._write(len(self._keys))
        with (self._directory / self._file).open("rb") as file:
            os.fsync(file.fileno())
        fences = np.concatenate([np.empty(0, np.uint64), *self._fences])
        # safetensors knows no uint64 here: the same bits as int64.
        written = write_tensors(
            self._directory / f"table{self._number:05d}.fences.safetensors", {"fences": fences.view(np.int64)}
        )
        layout = self._layout
        return ServingTable(
            self._name, layout.dim, self._dtype, layout.stored, self._rows, self._file, self._salt, written
        )

    def _write(self, count: int) -> None:
        """Writes the first `count` of the rows that are held, and forgets them."""
        layout = self._layout
        most = max(1, PART_BYTES // layout.block_bytes) * layout.rows
        with (self._directory / self._file).open("ab") as file:
            for at in range(0, count, most):
                stop = min(at + most, count)
                file.write(self._made(self._keys[at:stop], self._values[at:stop]))
        self._keys, self._values = self._keys[count:].copy(), self._values[count:].copy()

    def _made(self, keys: np.ndarray, values: np.ndarray) -> memoryview:
        layout = self._layout
        try:
            stored, scales = encode(values, layout.stored)
        except ValueError as error:
            raise ValueError(f"table {self._name!r}: {error}: use --rows int8, or leave --rows out") from None
        words = stored.view(layout.word)
        if layout.stored != self._dtype:
            self.change.add(values, decode(words, scales, layout.stored))
        count = layout.blocks_of(len(keys))
        memory = np.frombuffer(mmap.mmap(-1, count * layout.block_bytes), np.uint8)
        blocks = layout.view(memory)
        for n in range(count):
            mine = slice(n * layout.rows, min((n + 1) * layout.rows, len(keys)))
            held = mine.stop - mine.start
            blocks.keys[n, :held] = keys[mine]
            blocks.values[n, :held] = words[mine]
            if layout.scaled:
                blocks.scales[n, :held] = scales[mine]
        seal_blocks(blocks.words, self._blocks, np.uint64(self._salt))
        self._fences.append(hashes_of(np.ascontiguousarray(blocks.keys[:, 0])))
        self._blocks += count
        self._rows += len(keys)
        return memoryview(memory)  # type: ignore[arg-type]
