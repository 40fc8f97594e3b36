"""A file of a checkpoint on object storage, written once, front to back: what `DirectFile` is on local disk."""

from __future__ import annotations

import hashlib
from types import TracebackType

from nestpipe.files import Location


class UploadedFile:
    """Writes bytes and computes their SHA-256.  FileError if the server is lost."""

    def __init__(self, place: Location) -> None:
        self._upload = place.upload()
        self._sha = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> None:
        self._sha.update(data)
        self._upload.write(data)

    def end(self) -> str:
        """Completes the object.  Returns the digest of the file."""
        self._upload.complete()
        return self._sha.hexdigest()

    def __enter__(self) -> UploadedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._upload.abandon()
