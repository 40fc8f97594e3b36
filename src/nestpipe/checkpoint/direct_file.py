"""A file that is written once, front to back, with direct I/O where the file system supports it.

A checkpoint is rarely read.  In the page cache it would evict what is read again, such as training data, and
filling that cache costs more CPU than the rest of a checkpoint (docs/log.md).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
from pathlib import Path
from types import TracebackType

import numpy as np

_BUFFER_BYTES = 1 << 22
_BLOCK = 4096
"""Alignment of offsets, sizes and memory in direct writes; enough for any disk that we know of."""


class DirectFile:
    """Writes bytes and computes their SHA-256.  OSError for a full disk, missing permission or an existing file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        _set_direct(self._file, True)
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)  # page-aligned, as direct writes must be
        self._bytes = np.frombuffer(self._buffer, np.uint8)
        self._filled = 0
        self._sha = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        rest = np.frombuffer(data, np.uint8)
        while len(rest):
            count = min(len(rest), _BUFFER_BYTES - self._filled)
            self._bytes[self._filled : self._filled + count] = rest[:count]
            self._filled += count
            rest = rest[count:]
            if self._filled == _BUFFER_BYTES:
                self._flush(_BUFFER_BYTES)

    def end(self) -> str:
        """Writes and syncs the rest.  Returns the digest of the file."""
        whole = self._filled // _BLOCK * _BLOCK
        left = self._bytes[whole : self._filled].copy()
        self._flush(whole)
        _set_direct(self._file, False)
        self._bytes[: len(left)] = left
        self._flush(len(left))
        os.fsync(self._file)
        return self._sha.hexdigest()

    def _flush(self, count: int) -> None:
        self._filled = 0
        if not count:
            return
        view = memoryview(self._buffer)[:count]
        self._sha.update(view)
        write_all(self._file, view)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)


def write_all(file: int, view: memoryview) -> None:
    while len(view):
        try:
            count = os.write(file, view)
        except OSError as error:
            if error.errno != errno.EINVAL or not _is_direct(file):
                raise
            _set_direct(file, False)  # the file system accepts the flag but not the writes
            continue
        if count % _BLOCK:  # a nearly full disk, say: the rest is no longer aligned
            _set_direct(file, False)
        view = view[count:]


def _is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))


def _set_direct(file: int, on: bool) -> None:
    """Has no effect on a file system without direct I/O."""
    direct = getattr(os, "O_DIRECT", 0)
    with contextlib.suppress(OSError):
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        fcntl.fcntl(file, fcntl.F_SETFL, flags | direct if on else flags & ~direct)
