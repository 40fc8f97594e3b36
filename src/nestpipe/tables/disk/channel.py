"""A way into a scratch file: a block of DRAM, and the means to move many pieces between it and the file at once."""

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
"""Long transfers are cut into pieces of this many bytes, so that several are in flight."""


class DiskChannel:
    """One thread at a time; channels of a file do not wait for each other.

    `memory` is the one block of DRAM that bytes move from and to: io_uring wants to know it beforehand.
    """

    def __init__(self, file: DiskFile, memory_bytes: int, io: str = "auto") -> None:
        self._file = file
        self.memory = np.frombuffer(mmap.mmap(-1, memory_bytes), np.uint8)
        self._io = _open_io(io, self.memory)
        self.io = self._io.name

    def move(self, writing: bool, offsets: np.ndarray, lengths: np.ndarray, spots: np.ndarray) -> np.ndarray:
        """Moves lengths[i] bytes between offsets[i] of the file and spots[i] of the memory.  Returns as `Ring.transfer`."""
        self._file.check_open()
        return self._io.transfer(writing, self._file.fd, offsets, lengths, spots)

    def move_run(self, writing: bool, offset: int, length: int, spot: int) -> None:
        """Moves one long run of bytes in pieces.  DiskTierError if not all of it arrives."""
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


def _open_io(io: str, memory: np.ndarray) -> Ring | Preads:
    """`io`: "io_uring", "threads", or "auto" for the first that works here."""
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
