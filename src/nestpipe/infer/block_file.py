"""The file of a table's blocks: opened once, read block by block, every block checked before it is used."""

from __future__ import annotations

import errno
import mmap
import os
import stat
import weakref
from pathlib import Path

import numpy as np

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.infer.block_kernels import first_damaged
from nestpipe.infer.block_layout import BlockLayout, Blocks
from nestpipe.infer.errors import RowReadError
from nestpipe.tables.disk.channel import open_io

READ_BYTES = 1 << 23
"""Memory to read into.  More blocks than fit are read in several rounds."""
HINT = "restore it from a copy, or export it again"


class BlockFile:
    """Used by one thread at a time.  RowReadError, which names the file, where a block cannot be read or is damaged."""

    def __init__(
        self, path: Path, layout: BlockLayout, rows: int, salt: int, *, direct: bool, io: str = "auto"
    ) -> None:
        """`direct`: past the page cache, where the file system can.  CheckpointError if the file is not there, or too short."""
        self.path, self.layout = path, layout
        self.blocks = layout.blocks_of(rows)
        self._salt = np.uint64(salt)
        self.fd = open_plain(path, HINT, direct)
        self._close = weakref.finalize(self, os.close, self.fd)
        wanted = self.blocks * layout.block_bytes
        if (size := os.fstat(self.fd).st_size) != wanted:
            self._close()
            raise CheckpointError(f"{path} has {size:,} bytes instead of {wanted:,}; {HINT}")
        self._most = max(1, min(READ_BYTES // layout.block_bytes, self.blocks))
        memory = np.frombuffer(mmap.mmap(-1, self._most * layout.block_bytes), np.uint8)
        self._io = open_io(io, memory)
        self._read = layout.view(memory)
        self._map: mmap.mmap | None = None

    @property
    def most(self) -> int:
        """Blocks that `read` takes at a time."""
        return self._most

    def read(self, numbers: np.ndarray) -> Blocks:
        """These blocks, in this order, until the next call."""
        size = self.layout.block_bytes
        lengths = np.full(len(numbers), size)
        spots = np.arange(len(numbers)) * size
        try:
            moved = self._io.transfer(False, self.fd, numbers * size, lengths, spots)
        except OSError as error:
            raise RowReadError(f"{self.path} cannot be read: {error.strerror}; {HINT}") from None
        for i in np.flatnonzero(moved != lengths)[:1]:
            why = os.strerror(-int(moved[i])) if moved[i] < 0 else "it ends before that"
            raise RowReadError(f"{self.path}: reading {size} bytes at {numbers[i] * size} failed: {why}; {HINT}")
        bad = first_damaged(self._read.words[: len(numbers)], numbers, self._salt)
        if bad >= 0:
            raise RowReadError(f"{self.path} is damaged: block {numbers[bad]} does not match its checksum; {HINT}")
        return self._read

    def mapped(self) -> Blocks:
        """All blocks, as they lie in the page cache.  Not checked."""
        if not self.blocks:
            return self.layout.view(np.empty(0, np.uint8))
        self._map = mmap.mmap(self.fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        self._map.madvise(mmap.MADV_RANDOM)
        return self.layout.view(np.frombuffer(self._map, np.uint8))

    def drop_pages(self) -> None:
        """Takes the file's clean pages out of the page cache, for a measurement.  Pages that are mapped would stay."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._io.close()
        self._close()


def open_plain(path: Path, hint: str, direct: bool = False) -> int:
    """A descriptor of a regular file: no link, no pipe.  CheckpointError, which ends with `hint`, if there is none."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        try:
            number = os.open(path, flags | (getattr(os, "O_DIRECT", 0) if direct else 0))
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            number = os.open(path, flags)  # no direct I/O on this file system
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; {hint}") from None
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise CheckpointError(f"{path} cannot be read: {why}; {hint}") from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise CheckpointError(f"{path} cannot be read: it is not a regular file; {hint}")
    os.set_blocking(number, True)  # with O_NONBLOCK, which was for pipes, io_uring never waits for a disk
    return number
