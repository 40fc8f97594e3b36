"""A file or folder by the name that a user gave it: a local path, or a URL such as s3://bucket/logs/day1.parquet."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.fs as pafs

from nestpipe.files.errors import FileError, no_bucket
from nestpipe.files.patience import insist
from nestpipe.files.reader import RemoteReader
from nestpipe.files.systems import system_of
from nestpipe.files.upload import Upload
from nestpipe.files.url import Url, is_url

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """Something in a folder."""

    name: str
    """Relative to the folder, with "/" between parts."""
    is_file: bool
    size: int


@dataclass(frozen=True, order=True)
class Location:
    """Compares and sorts by its name.  Reading fails with OSError, or with FileError (one line) on object storage.

    On object storage a lost connection is tried again until a deadline (`patience`).
    """

    name: str
    """As a user reads it in messages."""

    @property
    def remote(self) -> bool:
        return is_url(self.name)

    @property
    def leaf(self) -> str:
        """The last part of its path."""
        return self._url().path.rpartition("/")[2] if self.remote else Path(self.name).name

    @property
    def parent(self) -> Location:
        if not self.remote:
            return Location(str(Path(self.name).parent))
        url = self._url()
        return Location(str(Url(url.scheme, url.bucket, url.path.rpartition("/")[0], url.query)))

    def __truediv__(self, name: str) -> Location:
        return Location(str(self._url().child(name)) if self.remote else str(Path(self.name) / name))

    def open(self) -> Any:
        """For reading, at any place (`pyarrow.NativeFile`)."""
        if self.remote:
            return pa.PythonFile(self._found(lambda: RemoteReader(self._url())), mode="r")
        filesystem, path = self.resolve()
        return filesystem.open_input_file(path)

    def read(self, most: int | None = None) -> bytes:
        """All of it.  OSError (EFBIG) if that is more than `most` bytes."""
        file = self._found(lambda: RemoteReader(self._url())) if self.remote else self.open()
        size = int(file.size())
        if most is not None and size > most:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than {most:,}", self.name)
        return bytes(file.read())

    def size(self) -> int:
        """In bytes."""
        return int(self._info().size)

    def version(self) -> str:
        """Changes when the contents do: when it was last modified, and its size."""
        info = self._info()
        return f"{info.mtime_ns}-{info.size}"

    def is_file(self) -> bool:
        return bool(self._any_info().type == pafs.FileType.File)

    def is_folder(self) -> bool:
        return bool(self._any_info().type == pafs.FileType.Directory)

    def entries(self, *, deep: bool = False) -> list[Entry]:
        """What is in the folder, by name; [] if there is none.  `deep`: at any depth."""
        root = self.resolve()[1].rstrip("/")
        selector = pafs.FileSelector(root, allow_not_found=True, recursive=deep)
        found = self._ask(lambda filesystem, _: filesystem.get_file_info(selector))
        return sorted(
            (
                Entry(info.path[len(root) :].strip("/"), info.type == pafs.FileType.File, int(info.size or 0))
                for info in found
            ),
            key=lambda entry: entry.name,
        )

    def sizes(self, names: list[str]) -> list[int | None]:
        """The sizes of files below this folder; None where there is none.  One round trip, about, for all of them."""
        root = self.resolve()[1]
        found = self._ask(lambda filesystem, _: filesystem.get_file_info([f"{root}/{name}" for name in names]))
        return [int(info.size) if info.type == pafs.FileType.File else None for info in found]

    def write(self, data: bytes) -> None:
        """Replaces the file by one act, on object storage.  Its folder need not exist there."""
        url = self._url()

        def act() -> None:
            filesystem, path = system_of(url)
            with filesystem.open_output_stream(path) as stream:
                stream.write(data)

        insist(url, act)

    def upload(self) -> Upload:
        """For a new file of any size."""
        return Upload(self._url())

    def remove(self) -> None:
        """Nothing happens if it is not there."""
        self._gone(lambda filesystem, path: filesystem.delete_file(path))

    def remove_folder(self) -> None:
        """With all that is in it.  Nothing happens if it is not there."""
        self._gone(lambda filesystem, path: filesystem.delete_dir(path))

    def resolve(self) -> tuple[pafs.FileSystem, str]:
        """The file system and the path in it."""
        if self.remote:
            url = self._url()
            return insist(url, lambda: system_of(url))
        return pafs.LocalFileSystem(), str(Path(self.name).expanduser())

    def _url(self) -> Url:
        try:
            return Url.parse(self.name)
        except ValueError as error:
            raise FileError(str(error)) from None

    def _ask(self, act: Callable[[pafs.FileSystem, str], T]) -> T:
        """The answer of the file system."""
        if self.remote:
            url = self._url()
            return insist(url, lambda: act(*system_of(url)))
        return act(*self.resolve())

    def _gone(self, act: Callable[[pafs.FileSystem, str], None]) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._ask(act)

    def _found(self, act: Callable[[], T]) -> T:
        """As `act`; a file that is not there may be one whose bucket is not there."""
        try:
            return act()
        except FileNotFoundError:
            raise self._missing() from None

    def _missing(self) -> Exception:
        if self.remote and (url := self._url()).scheme in ("s3", "gs"):
            bucket = insist(url, lambda: system_of(url)[0].get_file_info(url.bucket))
            if bucket.type == pafs.FileType.NotFound:
                return no_bucket(url)
        return FileNotFoundError(f"no such file: {self.name}")

    def _any_info(self) -> pafs.FileInfo:
        return self._ask(lambda filesystem, path: filesystem.get_file_info(path))

    def _info(self) -> pafs.FileInfo:
        info = self._any_info()
        if info.type != pafs.FileType.File:
            raise self._missing()
        return info

    def __str__(self) -> str:
        return self.name
