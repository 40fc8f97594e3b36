"""Access to a scratch file: a block of DRAM, and bulk transfers between it and the file."""

from __future__ import annotations

import logging
import mmap
from functools import cache

import numpy as np

from nestpipe.tables.disk.file import TRUNCATED, DiskFile, DiskTierError
from nestpipe.tables.disk.preads import Preads
from nestpipe.tables.disk.uring import Ring

log = logging.getLogger("nestpipe.tables.disk")

PIECE = 1 << 18
"""Long transfers are split into pieces of this many bytes, so that several are in flight."""


class DiskChannel:
    """Used by one thread at a time.  Channels of the same file do not wait for each other.

    All bytes move to and from `memory`, one block of DRAM: io_uring registers it in advance.
    """

    def __init__(self, file: DiskFile, memory_bytes: int, io: str = "auto") -> None:
        self._file = file
        self.memory = np.frombuffer(mmap.mmap(-1, memory_bytes), np.uint8)
        self._io = open_io(io, self.memory)
        self.io = self._io.name

    def move(self, writing: bool, offsets: np.ndarray, lengths: np.ndarray, spots: np.ndarray) -> np.ndarray:
        """Moves lengths[i] bytes between offsets[i] in the file and spots[i] in memory.

        Returns what `Ring.transfer` does.
        """
        self._file.check_open()
        return self._io.transfer(writing, self._file.fd, offsets, lengths, spots)

    def move_run(self, writing: bool, offset: int, length: int, spot: int) -> None:
        """Moves one long run of bytes in pieces.  DiskTierError if fewer bytes move."""
        starts = np.arange(0, length, PIECE)
        lengths = np.minimum(PIECE, length - starts)
        moved = self.move(writing, offset + starts, lengths, spot + starts)
        for i in np.flatnonzero(moved != lengths)[:1]:
            verb = "writing" if writing else "reading"
            doing = f"{verb} {lengths[i]} bytes at {offset + starts[i]}"
            if moved[i] < 0:
                raise self._file.failed(-int(moved[i]), doing, int(lengths[i]))
            name = f"{self._file.path} ({self._file.label})"
            raise DiskTierError(f"{name}: {doing}: only {moved[i]} bytes moved: {TRUNCATED}")

    def close(self) -> None:
        self._io.close()


def open_io(io: str, memory: np.ndarray) -> Ring | Preads:
    """`io`: "io_uring", "threads", or "auto" for the first of these that works."""
    if io not in ("auto", "io_uring", "threads"):
        raise ValueError(f"io must be auto, io_uring or threads, not {io!r}")
    if io != "threads":
        try:
            return Ring(memory)
        except OSError as error:
            if io == "io_uring":
                raise DiskTierError(f"{error.strerror}; io=threads works everywhere") from None
            _log_fallback(str(error.strerror))
    return Preads(memory)


@cache  # once, however many channels there are
def _log_fallback(reason: str) -> None:
    log.info("io_uring is not available (%s): the disk tier reads and writes with threads", reason)
