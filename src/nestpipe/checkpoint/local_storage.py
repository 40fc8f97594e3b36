"""Checkpoints in a directory that all workers share: one rename commits, one rename removes.

Names that begin with a dot are work in progress: `.writing-…` becomes a checkpoint by one rename,
`.removing-…` was one.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
import time
from pathlib import Path
from typing import IO

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.manifest import COMMIT, Manifest, name_of, seal, step_of, sync_directory
from nestpipe.checkpoint.plain_file import Place
from nestpipe.checkpoint.storage import Found

log = logging.getLogger("nestpipe.checkpoint")

LOCK = ".lock"
LEFTOVERS = {".writing-": "half written", ".removing-": "half removed"}


class LocalStorage:
    """A `Storage`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    def lock(self, seconds: float) -> None:
        """Ends with the process."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = (self.path / LOCK).open("a")
        until = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise CheckpointError(
                        f"{self.path} is in use by another process that trains this run: end that process first"
                    ) from None
                time.sleep(0.05)
            except OSError as error:
                log.warning(
                    "%s cannot be locked (%s): make sure that no other process trains this run",
                    self.path,
                    error.strerror,
                )
                break
        self._lock = file

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def found(self) -> list[Found]:
        if not self.path.is_dir():
            return []
        here = sorted(self.path.iterdir())
        return [one for path in here if (one := _found(path)) is not None]

    def place_of(self, step: int) -> Path:
        return self.path / name_of(step)

    def writing(self, step: int, attempt: str) -> Path:
        return self.path / f".writing-{name_of(step)}"

    def start_writing(self, directory: Place) -> None:
        _local(directory).mkdir(parents=True, exist_ok=True)

    def commit(self, step: int, directory: Place, manifest: Manifest) -> str:
        """By one rename, after everything in the directory is on disk.  CheckpointError if the step exists."""
        digest = seal(_local(directory), manifest)
        final = self.place_of(step)
        if final.exists():
            raise CheckpointError(f"{final} already exists: use another folder, or train another step first")
        _local(directory).rename(final)
        sync_directory(self.path)
        return digest

    def remove(self, place: Place) -> None:
        path = _local(place)
        gone = path.with_name(f".removing-{path.name}")
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        sync_directory(self.path)
        shutil.rmtree(gone, ignore_errors=True)

    def discard(self, directory: Place) -> None:
        shutil.rmtree(_local(directory), ignore_errors=True)

    def tidy(self) -> None:
        if self.path.is_dir():
            for path in [*self.path.glob(".writing-*"), *self.path.glob(".removing-*")]:
                shutil.rmtree(path, ignore_errors=True)


def _found(path: Path) -> Found | None:
    leftover = next((why for start, why in LEFTOVERS.items() if path.name.startswith(start)), None)
    if leftover is not None:
        return Found(path.name, path, None, f"{leftover}: the next run that writes here will remove it")
    step = step_of(path.name)
    if step is None:
        return None
    return Found(path.name, path, step, "" if (path / COMMIT).is_file() else f"not committed: it has no {COMMIT}")


def _local(place: Place) -> Path:
    assert isinstance(place, Path)
    return place
