"""Checkpoints on object storage, where nothing can be renamed: one PUT commits, one DELETE removes.

A checkpoint is the directory `step-00000500.ATTEMPT`, and has the same files as on local disk.  The attempt is new for each
checkpoint that anyone begins, so that nothing is ever written twice, not even by a worker of a killed run that lives a moment
longer.  The files come first, then `manifest.json`, then `COMMIT`.  It is a checkpoint if both are there and match.  `COMMIT`
is removed first, `manifest.json` second: whatever is left then, and a `COMMIT` that arrives late, is garbage.
"""

from __future__ import annotations

import contextlib
import re

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.lease import Lease
from nestpipe.checkpoint.manifest import COMMIT, MANIFEST, SEAL_BYTES, Manifest, name_of, sealed, step_of
from nestpipe.checkpoint.plain_file import Place
from nestpipe.checkpoint.storage import Found
from nestpipe.files import FileError, Location

_NAME = re.compile(r"(step-[0-9]{8,18})(\.[0-9a-z-]+)?")


class RemoteStorage:
    """A `Storage`."""

    def __init__(self, path: Location) -> None:
        self.path = path
        self._lease: Lease | None = None

    def lock(self, seconds: float) -> None:
        """By a lease, which ends some seconds after its process."""
        lease = Lease(self.path)
        lease.take(seconds)
        self._lease = lease

    def unlock(self) -> None:
        if self._lease is not None:
            self._lease.give_back()
            self._lease = None

    def found(self) -> list[Found]:
        there = [(entry.name, step) for entry in self.path.entries() if (step := step_in(entry.name)) is not None]
        names = [f"{name}/{file}" for name, _ in there for file in (COMMIT, MANIFEST)]
        sizes = self.path.sizes(names) if names else []
        # HDFS shows a file while it is written: only the whole COMMIT counts.
        return [
            Found(name, self.path / name, step, _problem(commit == SEAL_BYTES and manifest is not None))
            for (name, step), commit, manifest in zip(there, sizes[::2], sizes[1::2])
        ]

    def place_of(self, step: int) -> Location:
        places = [one.place for one in self.found() if one.step == step and not one.problem]
        found = places[-1] if places else self.path / name_of(step)
        assert isinstance(found, Location)
        return found

    def writing(self, step: int, attempt: str) -> Location:
        return self.path / f"{name_of(step)}.{attempt}"

    def start_writing(self, directory: Place) -> None:
        """Nothing: object storage has no directories."""

    def commit(self, step: int, directory: Place, manifest: Manifest) -> str:
        """By the PUT of COMMIT, when everything else is there.  CheckpointError if the step exists."""
        assert isinstance(directory, Location)
        if any(one.step == step and not one.problem for one in self.found()):
            raise CheckpointError(
                f"{self.path / name_of(step)} already exists: use another folder, or train another step first"
            )
        text, digest = sealed(manifest)
        (directory / MANIFEST).write(text)
        if self._lease is not None:
            self._lease.check()
        (directory / COMMIT).write(digest.encode() + b"\n")
        return digest

    def remove(self, place: Place) -> None:
        assert isinstance(place, Location)
        (place / COMMIT).remove()
        (place / MANIFEST).remove()
        place.remove_folder()

    def discard(self, directory: Place) -> None:
        with contextlib.suppress(FileError, OSError):
            self.remove(directory)

    def tidy(self) -> None:
        for one in self.found():
            if one.problem:
                self.discard(one.place)


def step_in(name: str) -> int | None:
    """The step in the name of a directory on object storage; a copy of a local checkpoint has no attempt."""
    match = _NAME.fullmatch(name)
    return step_of(match[1]) if match else None


def _problem(committed: bool) -> str:
    return "" if committed else f"not committed: it has no {COMMIT}; the next run that writes here will remove it"
