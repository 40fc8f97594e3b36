"""Where the histories of a log are kept: a folder that is named by a digest of the log and the settings.

A folder gets that name by one rename, when all of it is written.  Work in progress is in `.writing-…`, where a later
process goes on after a kill.  One process at a time prepares a log; others wait for it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from nestpipe.data.interactions.columns import EventColumns
from nestpipe.data.interactions.event_files import EventFile
from nestpipe.data.interactions.events import Progress
from nestpipe.data.interactions.grouping import Filters, group_events, no_room
from nestpipe.data.source import DataError

VERSION = 1
"""Of what is kept.  Another one is another folder."""
MANIFEST = "manifest.json"
POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Prepared:
    """Histories that are ready to be read."""

    path: Path
    statistics: dict[str, Any]

    def files(self) -> list[Path]:
        return sorted(self.path.glob("histories-*.parquet"))


@dataclass(frozen=True)
class Preparation:
    """A log, and what is to become of it."""

    files: Sequence[EventFile]
    columns: EventColumns
    filters: Filters
    time_unit: str | None
    cache: Path
    memory_bytes: int

    def digest(self) -> str:
        """Of everything that the result depends on."""
        about = {
            "version": VERSION,
            "files": [
                (str(file.location), file.location.version(), file.delimiter, file.skip, file.text_ids)
                for file in self.files
            ],
            "columns": asdict(self.columns),
            "filters": asdict(self.filters),
            "time_unit": self.time_unit,
        }
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]

    def find(self) -> Prepared | None:
        """The result, if it is there."""
        path = self.cache / self.digest()
        return read_manifest(path) if path.is_dir() else None

    def make(self, progress: Progress) -> Prepared:
        """The result: found, made, or made meanwhile by another process."""
        try:
            digest = self.digest()
        except OSError as error:
            raise DataError(f"data.paths: {error}") from None
        path, writing = self.cache / digest, self.cache / f".writing-{digest}"
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
            with (self.cache / f".lock-{digest}").open("a+") as lock:
                _wait_for(lock, progress)
                progress = _told_to_others(lock, progress)
                if path.is_dir():
                    return read_manifest(path)
                writing.mkdir(exist_ok=True)
                for half in [
                    *writing.glob("histories-*"),
                    *writing.glob("catalogue*"),
                    *writing.glob("events/*.partial"),
                ]:
                    half.unlink()
                statistics = asdict(
                    group_events(
                        self.files, self.columns, self.filters, self.time_unit, writing, self.memory_bytes, progress
                    )
                )
                _seal(writing, statistics)
                writing.rename(path)
        except (OSError, pa.ArrowException) as error:
            if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
                raise no_room(writing) from None
            raise DataError(
                f"data.cache: cannot write {self.cache} ({error}): set it to a folder that you may write to"
            ) from None
        return read_manifest(path)


def _wait_for(lock: Any, progress: Progress) -> None:
    """Until nobody else prepares this log.  The lock ends with its process, however that ends."""
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            progress(*_told(lock))
            time.sleep(POLL_SECONDS)


def _told_to_others(lock: Any, progress: Progress) -> Progress:
    """Progress that the processes that wait for this one can read in the lock file."""
    last = 0.0

    def tell(done: float, what: str) -> None:
        nonlocal last
        if time.monotonic() - last > POLL_SECONDS:
            last = time.monotonic()
            with contextlib.suppress(OSError):
                os.pwrite(lock.fileno(), f"{done:.4f} {what:<60.60}".encode(), 0)
        progress(done, what)

    return tell


def _told(lock: Any) -> tuple[float, str]:
    done, _, what = os.pread(lock.fileno(), 100, 0).decode(errors="replace").partition(" ")
    try:
        return float(done), f"{what.strip()} (by another worker)"
    except ValueError:
        return 0.0, "by another worker"


def _seal(folder: Path, statistics: dict[str, Any]) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.glob("*.parquet"))}
    shutil.rmtree(folder / "spill", ignore_errors=True)
    (folder / MANIFEST).write_text(json.dumps({"version": VERSION, "files": sizes, "statistics": statistics}, indent=1))


def read_manifest(path: Path) -> Prepared:
    """DataError unless the folder is whole."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        whole = manifest["version"] == VERSION and all(
            (path / name).stat().st_size == size for name, size in manifest["files"].items()
        )
        statistics = dict(manifest["statistics"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        whole, statistics = False, {}
    if not whole:
        raise DataError(f"{path}, which holds grouped events, is damaged: remove it, and it is made again")
    return Prepared(path, statistics)
