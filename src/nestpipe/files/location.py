"""A file or folder by the name that a user gave it: a local path, or a URL such as s3://bucket/logs/day1.parquet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs


@dataclass(frozen=True, order=True)
class Location:
    """Compares and sorts by its name.  Opening it may fail with OSError."""

    name: str
    """As a user reads it in messages."""

    def open(self) -> Any:
        """For reading, at any place (`pyarrow.NativeFile`)."""
        filesystem, path = self.resolve()
        return filesystem.open_input_file(path)

    def size(self) -> int:
        """In bytes."""
        return int(self._info().size)

    def version(self) -> str:
        """Changes when the contents do: when it was last modified, and its size."""
        info = self._info()
        return f"{info.mtime_ns}-{info.size}"

    def resolve(self) -> tuple[pafs.FileSystem, str]:
        """The file system and the path in it."""
        if "://" in self.name:
            return pafs.FileSystem.from_uri(self.name)
        return pafs.LocalFileSystem(), str(Path(self.name).expanduser())

    def _info(self) -> pafs.FileInfo:
        filesystem, path = self.resolve()
        info = filesystem.get_file_info(path)
        if info.type != pafs.FileType.File:
            raise FileNotFoundError(f"no such file: {self.name}")
        return info

    def __str__(self) -> str:
        return self.name
