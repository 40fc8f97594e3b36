"""A file on object storage that is read at any place; a lost connection is made anew."""

from __future__ import annotations

import io
from typing import Any

from nestpipe.files.patience import insist
from nestpipe.files.systems import system_of
from nestpipe.files.url import Url

PIECE = 1 << 23
"""Bytes asked for at a time: the deadline is for so many."""


class RemoteReader:
    """What `pyarrow.PythonFile` needs.  One thread at a time.  FileError if the server is lost for too long."""

    def __init__(self, url: Url) -> None:
        self._url = url
        self._file = self._opened()
        self._size = int(self._file.size())
        self._at = 0
        self.closed = False

    def _opened(self) -> Any:
        def act() -> Any:
            filesystem, path = system_of(self._url)
            return filesystem.open_input_file(path)

        return insist(self._url, act)

    def read(self, count: int = -1) -> bytes:
        stop = self._size if count is None or count < 0 else min(self._at + count, self._size)
        parts = []
        while self._at < stop:
            part = self._piece(self._at, min(PIECE, stop - self._at))
            if not part:
                break
            parts.append(part)
            self._at += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _piece(self, at: int, count: int) -> bytes:
        return insist(self._url, lambda: bytes(self._file.read_at(count, at)))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self._size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True
