"""Reads regular files only: no links, which may lead anywhere, and no pipes or devices, which may never end.

On object storage there are no such things, and the same functions take a `Location`.
"""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from nestpipe.files import Location

Place: TypeAlias = "Path | Location"
"""A file or directory of a checkpoint: on local disk, or on object storage."""


@dataclass(frozen=True)
class Written:
    """Name, size and digest of a file that was written."""

    name: str
    bytes: int
    sha256: str


def read_plain(place: Place, most: int) -> bytes:
    """The contents of a regular file of at most `most` bytes.  Otherwise OSError, with the reason in `strerror`."""
    if isinstance(place, Location):
        try:
            return place.read(most)
        except FileNotFoundError:
            raise _no_file(place) from None
    try:
        number = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", str(place)) from None
        raise
    with os.fdopen(number, "rb") as file:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(place))
        if status.st_size > most:
            raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes, more than {most:,}", str(place))
        return file.read(status.st_size)


def plain_size(place: Place) -> int:
    """The size of a regular file.  Otherwise OSError, with the reason in `strerror`."""
    if isinstance(place, Location):
        try:
            return place.size()
        except FileNotFoundError:
            raise _no_file(place) from None
    status = place.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, "it is a link", str(place))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(place))
    return status.st_size


def plain_sizes(directory: Place, names: list[str]) -> list[int]:
    """The sizes of several files.  On object storage by one listing: a request for each would take minutes."""
    if not isinstance(directory, Location):
        return [plain_size(directory / name) for name in names]
    found = {entry.name: entry.size for entry in directory.entries() if entry.is_file}
    for name in names:
        if name not in found:
            raise _no_file(directory / name)
    return [found[name] for name in names]


def write_plain(place: Place, data: bytes) -> None:
    """A small file.  On object storage it appears whole, or not at all."""
    if isinstance(place, Location):
        place.write(data)
    else:
        place.write_bytes(data)


def remove_plain(place: Place) -> None:
    if isinstance(place, Location):
        place.remove()
    else:
        place.unlink()


def _no_file(place: Location) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place))
