"""Reads regular files only: no links, which may lead anywhere, and no pipes or devices, which may never end."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Written:
    """Name, size and digest of a file that was written."""

    name: str
    bytes: int
    sha256: str


def read_plain(path: Path, most: int) -> bytes:
    """The contents of a regular file of at most `most` bytes.  Otherwise OSError, with the reason in `strerror`."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", str(path)) from None
        raise
    with os.fdopen(number, "rb") as file:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if status.st_size > most:
            raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, more than {most:,}", str(path))
        return file.read(status.st_size)


def plain_size(path: Path) -> int:
    """The size of a regular file.  Otherwise OSError, with the reason in `strerror`."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a link", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return status.st_size
