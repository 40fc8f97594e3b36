"""A scratch file for records: opened with direct I/O and grown in steps.  Channels read and write it.

The file is unlinked as soon as it is open, so no crash leaves it behind.  Its space is freed when the process ends.
"""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import weakref
from pathlib import Path

BLOCK = 4096
"""Writes are multiples of this, and so are reads unless the disk can address smaller units."""
_AT_EMPTY_PATH, _STATX_DIOALIGN = 0x1000, 0x2000
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskTierError(OSError):
    """The disk tier cannot continue: no space, no file, or corrupt bytes.

    The message is one line and says what to change.
    """


class DiskFile:
    def __init__(self, directory: str, name: str, label: str) -> None:
        self.label = label
        """What the file holds, for errors."""
        self.bytes = 0
        self.path, self.fd = _open_scratch(directory, name)
        self._close = weakref.finalize(self, os.close, self.fd)
        self.align = _least_read(self.fd)
        """Offsets and lengths of reads must be multiples of this."""

    def grow(self, by: int, least: int) -> int:
        """Adds `by` bytes, or only `least` if the disk has less left.  Returns how many."""
        while True:
            try:
                self._allocate(by)
                break
            except OSError as error:
                if error.errno not in _FULL or by == least:
                    raise self.failed(error.errno or 0, "growing it", by) from None
                by = least
        self.bytes += by
        return by

    def check_open(self) -> None:
        """DiskTierError after `close`: the descriptor may belong to another file by now."""
        if not self._close.alive:
            raise DiskTierError(f"{self.path} ({self.label}): used after it was closed")

    def failed(self, problem: int, doing: str, needed: int) -> DiskTierError:
        """The error for a transfer or growth that failed with error number `problem`."""
        if problem not in _FULL:
            return DiskTierError(f"{self.path} ({self.label}): {doing} failed: {os.strerror(problem)}")
        disk = os.fstatvfs(self.fd)
        return DiskTierError(
            f"{self.path} ({self.label}): {doing} failed, {os.strerror(problem)}: the file has {_mb(self.bytes)} MB, needs "
            f"{_mb(needed)} MB more, and {_mb(disk.f_bavail * disk.f_frsize)} MB are free: set tables.disk_path to a larger "
            "disk, raise tables.dram_rows, or use more workers"
        )

    def short(self, what: str, offset: int, length: int, moved: int) -> DiskTierError:
        """The error for a read of `what` that returned too few bytes or an error number."""
        where = f"{self.path} ({self.label}): {what}: reading {length} bytes at {offset}"
        if moved < 0:
            return DiskTierError(f"{where} failed: {os.strerror(-moved)}")
        return DiskTierError(f"{where} gave only {moved}: {TRUNCATED}")

    def close(self) -> None:
        """Frees the space.  The file cannot be used afterwards."""
        self._close()

    def _allocate(self, by: int) -> None:
        try:
            os.posix_fallocate(self.fd, self.bytes, by)
        except OSError as error:
            # No fallocate here, and glibc's substitute fails with direct I/O: a full disk shows when writing.
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            os.truncate(self.fd, self.bytes + by)


TRUNCATED = "the file was truncated from outside; restart from a checkpoint"


def _open_scratch(directory: str, name: str) -> tuple[str, int]:
    if not Path(directory).is_dir():
        raise DiskTierError(f"tables.disk_path: {directory} is not a directory on this machine")
    try:
        made, path = tempfile.mkstemp(prefix=f"nestpipe-{name}-", suffix=".rows", dir=directory)
        os.close(made)
        try:
            # Not every file system supports direct I/O (tmpfs of old kernels): fall back to the page cache.
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0))
            except OSError:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        finally:
            Path(path).unlink()
    except OSError as error:
        raise DiskTierError(f"tables.disk_path: cannot make a file in {directory}: {error.strerror}") from None
    return path, fd


def _least_read(fd: int) -> int:
    """512 if the file system reports (Linux 6.1) that the disk reads single sectors, else a block.

    Trying a short read would prove nothing: ext4 serves one that is too short for the disk from the page cache.
    """
    answer = (ctypes.c_uint32 * 64)()
    try:
        failed = ctypes.CDLL(None).statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer)
    except AttributeError:
        return BLOCK
    said = not failed and answer[0] & _STATX_DIOALIGN
    return min(BLOCK, max(512, answer[39])) if said and answer[39] else BLOCK  # word 39: stx_dio_offset_align


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f}"
