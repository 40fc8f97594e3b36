"""What a folder of checkpoints needs of the place where it is.  `LocalStorage` and `RemoteStorage` have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from nestpipe.checkpoint.manifest import Manifest
from nestpipe.checkpoint.plain_file import Place

LOCK_SECONDS = 10.0
"""How long a process that was just killed may take to be gone."""


@dataclass(frozen=True)
class Found:
    """A directory that is a checkpoint, or looks like one."""

    name: str
    place: Place
    step: int | None
    """None: its name says that it is half written or half removed."""
    problem: str = ""
    """Why no run can resume from it; empty: it is committed."""


class Storage(Protocol):
    """Any process may read.  Only worker 0 writes, except for the files of a checkpoint that is being written."""

    @property
    def path(self) -> Place: ...

    def lock(self, seconds: float) -> None:
        """No two processes may train one run: CheckpointError after `seconds` if another one does."""

    def unlock(self) -> None: ...

    def found(self) -> list[Found]:
        """By name.  [] where there is no folder."""

    def place_of(self, step: int) -> Place:
        """Where the checkpoint of a step is, or would be."""

    def writing(self, step: int, attempt: str) -> Place:
        """The directory of a checkpoint's files until its commit.  `attempt` is new each time, and equal on all workers."""

    def start_writing(self, directory: Place) -> None:
        """Any worker may call it."""

    def commit(self, step: int, directory: Place, manifest: Manifest) -> str:
        """Makes it a checkpoint by one act, when all of its files are there.  Returns the manifest's digest."""

    def remove(self, place: Place) -> None:
        """It stops being a checkpoint by one act, before anything of it is removed."""

    def discard(self, directory: Place) -> None:
        """Removes what was written and not committed.  Raises nothing."""

    def tidy(self) -> None:
        """Removes checkpoints that an earlier process left half written or half removed."""
