"""Rows straight from a checkpoint's files, memory-mapped: all shards of all workers, and all checkpoints of a chain.

All files are mapped before anything is read.  From then on a training run may remove the checkpoint: what is mapped stays.
Every check of a restore is made: digests, shapes, owners, duplicate keys, counts.
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path

import numba
import numpy as np
import torch

from nestpipe.checkpoint.errors import RECOVERY_HINT, CheckpointError
from nestpipe.checkpoint.folder import Checkpoint
from nestpipe.checkpoint.manifest import File
from nestpipe.checkpoint.plain_file import Written
from nestpipe.checkpoint.row_files import DuplicateKeyCheck, count_rows, in_order, read_rows
from nestpipe.checkpoint.tensors import check_data, parse_tensors
from nestpipe.infer.block_file import open_plain
from nestpipe.keys import HashIndex
from nestpipe.tables.disk.native import copy_bytes

INDEX_BYTES = 40
"""Memory of a key, at most: itself, its place in the index, the address of its row."""


@numba.njit(nogil=True, cache=True)
def _copy_rows(addresses, slots, row_bytes, target):  # type: ignore[no-untyped-def]
    """Copies the row of each slot to `target`, one after another; leaves out slots below 0."""
    for i in range(slots.shape[0]):
        if slots[i] >= 0:
            copy_bytes(target + i * row_bytes, addresses[slots[i]], row_bytes)


class HeldFiles:
    """The files of a chain, mapped.  CheckpointError if one is not there, or has another size."""

    def __init__(self, chain: list[Checkpoint]) -> None:
        self._mapped: dict[Path, np.ndarray] = {}
        for checkpoint in chain:
            for file in checkpoint.manifest.files:
                if file.kind != "worker":
                    assert isinstance(checkpoint.path, Path)
                    path = checkpoint.path / file.name
                    self._mapped[path] = _mapped(path, file)

    def read(self, path: Path, written: Written) -> dict[str, torch.Tensor]:
        """The tensors of a file, after its digest is checked.  Copies."""
        data = self._mapped[path]
        check_data(path, written, memoryview(data))  # type: ignore[arg-type]
        return parse_tensors(path, data.tobytes())

    def address(self, path: Path, name: str) -> int:
        """Where a tensor lies.  Only for a file that was read: its header was checked then."""
        data = self._mapped[path]
        size = int.from_bytes(data[:8].tobytes(), "little")
        begin, _ = json.loads(data[8 : 8 + size].tobytes())[name]["data_offsets"]
        return int(data.ctypes.data) + 8 + size + int(begin)


def _mapped(path: Path, file: File) -> np.ndarray:
    number = open_plain(path, RECOVERY_HINT)
    try:
        size = os.fstat(number).st_size
        if size != file.bytes:
            raise CheckpointError(f"{path} has {size:,} bytes instead of {file.bytes:,}; {RECOVERY_HINT}")
        return np.frombuffer(mmap.mmap(number, 0, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
    finally:
        os.close(number)  # the mapping keeps the file


class MappedGroup:
    """The rows of a table group at the end of a chain.  Any thread."""

    def __init__(self, held: HeldFiles, chain: list[Checkpoint], group: int) -> None:
        described = chain[-1].manifest.groups[group]
        self._held = held
        self.dim, self.dtype = described.dim, np.dtype(described.dtype)
        self._row_bytes = self.dim * self.dtype.itemsize
        most = sum(count_rows(checkpoint, group) for checkpoint in chain)
        self._index = HashIndex(most + 1)
        self._addresses = np.zeros(most + 1, np.int64)
        for checkpoint in chain:
            # The first fills an empty index.  Later ones need one of their own.
            duplicates = DuplicateKeyCheck(self._index if checkpoint is chain[0] else count_rows(checkpoint, group))
            for file in in_order(checkpoint.manifest.files):
                if file.group == group:
                    self._apply(checkpoint, file, duplicates)
        if len(self._index) != described.rows:
            raise CheckpointError(
                f"{chain[-1].path}: table {described.tables[0]!r} has {len(self._index):,} rows in its files and "
                f"{described.rows:,} in its manifest; {RECOVERY_HINT}"
            )

    def _apply(self, checkpoint: Checkpoint, file: File, duplicates: DuplicateKeyCheck) -> None:
        rows = read_rows(checkpoint, file, self._held.read)
        if file.kind == "removed":
            self._index.delete(rows.keys, rows.tables)
            return
        duplicates.add(rows, checkpoint, file)
        slots = self._index.insert(rows.keys, rows.tables)
        assert isinstance(checkpoint.path, Path)
        first = self._held.address(checkpoint.path / file.name, "values") if len(rows) else 0
        self._addresses[slots] = first + np.arange(len(rows)) * self._row_bytes

    def read(self, table: int, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values of every key of a table, and which have a row; of the others anything."""
        slots = self._index.find(keys, np.full(len(keys), table, np.uint16))
        values = np.empty((len(keys), self.dim), self.dtype)
        _copy_rows(self._addresses, slots, self._row_bytes, values.ctypes.data)
        return values, slots >= 0

    def nbytes(self) -> int:
        """Memory that only this process can give back."""
        return self._index.nbytes() + 8 * self._index.slots_used


class MappedRows:
    """One table of a group."""

    def __init__(self, group: MappedGroup, number: int) -> None:
        self._group, self._number = group, number

    def read(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Values of every key, and which have a row; of the others anything."""
        return self._group.read(self._number, keys)

    def nbytes(self) -> int:
        """Of the whole group, counted with its first table."""
        return self._group.nbytes() if self._number == 0 else 0

    def close(self) -> None:
        """Nothing: memory is freed with the group."""
