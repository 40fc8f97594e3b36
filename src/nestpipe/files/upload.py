"""A new object, written front to back in parts.  It appears whole when it is complete, or never."""

from __future__ import annotations

import ctypes
from types import TracebackType
from typing import Any

from nestpipe.files.patience import insist
from nestpipe.files.systems import UPLOAD_ATTEMPTS, system_of
from nestpipe.files.url import Url

PIECE = 1 << 23
"""Bytes given to pyarrow at a time: the deadline is for so many."""


class Upload:
    """Memory holds one part, some 10 MB.  FileError if the server is lost; nothing can be written to it after that.

    It replaces an object of the same name.  Left through an exception, or never completed, it leaves no object, but parts
    that the server keeps until a rule of the bucket removes them (AbortIncompleteMultipartUpload).
    """

    def __init__(self, url: Url) -> None:
        self._url = url

        def act() -> Any:
            filesystem, path = system_of(url, UPLOAD_ATTEMPTS)
            return filesystem.open_output_stream(path)

        self._stream: Any = insist(url, act)
        # pyarrow completes an upload when it forgets its stream, and cannot be told not to.  So it must not forget it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._stream))
        self.closed = False

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        for at in range(0, len(view), PIECE):
            insist(self._url, lambda part=view[at : at + PIECE]: self._stream.write(part), again=False)  # type: ignore[misc]
        return len(view)

    def complete(self) -> None:
        """The object is there when this returns."""
        insist(self._url, self._stream.close, again=False)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._stream))
        self.closed = True

    def abandon(self) -> None:
        """No object appears."""
        self.closed = True

    def __enter__(self) -> Upload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abandon()
        elif not self.closed:
            self.complete()

    # What pyarrow.PythonFile asks for besides.

    def flush(self) -> None:
        pass

    def close(self) -> None:
        """Nothing: who made the upload completes or abandons it."""

    def tell(self) -> int:
        return int(self._stream.tell())

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False
