"""A file that is written once, from its beginning to its end, past the page cache where its file system allows that.

A checkpoint is read after a death or never.  In the page cache it would take the place of what is read again, such as data, and
filling that cache costs more CPU than all else about a checkpoint (docs/log.md).
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

_ROOM = 1 << 22
_BLOCK = 4096
"""Places, sizes and memory of direct writes are multiples of it; enough for any disk that we know of."""


class DirectFile:
    """Takes bytes, and knows their SHA-256 at the end.  OSError as it comes: a full disk, no permission, a file that is there."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        _set_direct(self._file, True)
        self._room = mmap.mmap(-1, _ROOM)  # begins with a page, as direct writes must
        self._bytes = np.frombuffer(self._room, np.uint8)
        self._filled = 0
        self._sha = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        rest = np.frombuffer(data, np.uint8)
        while len(rest):
            count = min(len(rest), _ROOM - self._filled)
            self._bytes[self._filled : self._filled + count] = rest[:count]
            self._filled += count
            rest = rest[count:]
            if self._filled == _ROOM:
                self._flush(_ROOM)

    def end(self) -> str:
        """All of it is on disk; its digest."""
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
        view = memoryview(self._room)[:count]
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
            _set_direct(file, False)  # a file system that takes the flag and then not the writes
            continue
        if count % _BLOCK:  # the disk is nearly full, say: what follows could not be written directly
            _set_direct(file, False)
        view = view[count:]


def _is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))


def _set_direct(file: int, on: bool) -> None:
    """Not every file system can (tmpfs could not for long): then it is a plain file."""
    direct = getattr(os, "O_DIRECT", 0)
    with contextlib.suppress(OSError):
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        fcntl.fcntl(file, fcntl.F_SETFL, flags | direct if on else flags & ~direct)
