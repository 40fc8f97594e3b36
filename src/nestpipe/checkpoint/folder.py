"""The folder that holds a run's checkpoints: what is committed, what stands on what, what may go.

Names that begin with a dot are work in progress: `.writing-…` becomes a checkpoint by one rename, `.removing-…` was one.
"""

from __future__ import annotations

import fcntl
import logging
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.manifest import COMMIT, Base, Manifest, name_of, read_manifest, step_of, sync_directory
from nestpipe.checkpoint.tensors import OTHERWISE

log = logging.getLogger("nestpipe.checkpoint")

LOCK = ".lock"
LOCK_SECONDS = 10.0
LESS_IS_BETTER = ("loss", "log_loss", "ne")


@dataclass(frozen=True)
class Checkpoint:
    """One that is committed."""

    path: Path
    manifest: Manifest
    digest: str

    @property
    def base(self) -> Base:
        """As another one names it that stands on it."""
        return Base(self.path.name, self.digest)


class Folder:
    """Read by anybody; written by worker 0 alone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    def lock(self, seconds: float = LOCK_SECONDS) -> None:
        """Worker 0, before it changes anything: a run that goes on twice would train over itself.  Gone with the process."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = (self.path / LOCK).open("a")
        until = time.monotonic() + seconds  # one that was just killed may still be on its way out
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise CheckpointError(
                        f"{self.path} is in use by another process that trains this run: end that one first"
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

    def steps(self) -> list[int]:
        """Steps of what looks like a committed checkpoint, ascending."""
        if not self.path.is_dir():
            return []
        found = ((step_of(path.name), path) for path in self.path.iterdir())
        return sorted(step for step, path in found if step is not None and (path / COMMIT).is_file())

    def read(self, step: int) -> Checkpoint:
        path = self.path / name_of(step)
        manifest, digest = read_manifest(path)
        if manifest.step != step:
            raise CheckpointError(
                f"{path} says that it is of step {manifest.step}: it was renamed; give it its own name"
            )
        return Checkpoint(path, manifest, digest)

    def find(self, step: int | None = None) -> Checkpoint | None:
        """The checkpoint of a step, or the last one; None where there is none at all.  CheckpointError if it is damaged: a run
        that silently went on from an older one would lose work without a word."""
        steps = self.steps()
        if step is None:
            return self.read(steps[-1]) if steps else None
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"no checkpoint of step {step} in {self.path}; there are {there}")
        return self.read(step)

    def chain(self, last: Checkpoint) -> list[Checkpoint]:
        """What must be applied, in order, to get `last`: a full one, and what changed since."""
        found: list[Checkpoint] = []
        for base in last.manifest.base:
            step = step_of(base.name)
            assert step is not None
            one = self.read(step)
            if one.digest != base.sha256:
                raise CheckpointError(
                    f"{last.path} stands on a {base.name} that is not there any more: it was written anew; "
                    "resume from another checkpoint with --from STEP"
                )
            if one.manifest.base != last.manifest.base[: len(found)]:
                what = "is not complete in itself" if not found else "does not stand on the one before it"
                raise CheckpointError(f"{last.path} stands on {base.name}, which {what}; {OTHERWISE}")
            if [replace(group, rows=0) for group in one.manifest.groups] != [
                replace(group, rows=0) for group in last.manifest.groups
            ]:
                raise CheckpointError(f"{last.path} stands on {base.name}, which has other tables; {OTHERWISE}")
            found.append(one)
        return [*found, last]

    def writing(self, step: int) -> Path:
        """Where the files of a checkpoint go until it is committed."""
        return self.path / f".writing-{name_of(step)}"

    def start_writing(self, step: int) -> None:
        """Any worker."""
        self.writing(step).mkdir(parents=True, exist_ok=True)

    def commit(self, step: int) -> Path:
        """The one rename.  Everything in the directory is on disk before it; no checkpoint of this step is there."""
        final = self.path / name_of(step)
        if final.exists():
            raise CheckpointError(f"{final} is there already: begin in another folder, or train a step before the next")
        self.writing(step).rename(final)
        sync_directory(self.path)
        return final

    def tidy(self) -> None:
        """Removes what an earlier process left half written or half removed."""
        if self.path.is_dir():
            for path in [*self.path.glob(".writing-*"), *self.path.glob(".removing-*")]:
                shutil.rmtree(path, ignore_errors=True)

    def rewind_to(self, step: int) -> None:
        """The run goes on from this step: those of later ones are of a branch that is given up.  The last one goes first, so
        that what is left is whole whenever this is interrupted."""
        there = [(step_of(path.name), path) for path in self.path.iterdir()] if self.path.is_dir() else []
        for _, path in sorted(((at, path) for at, path in there if at is not None and at > step), reverse=True):
            self._remove(path)

    def prune(self, keep: int, best: str | None) -> None:
        """Leaves the last `keep`, the best by metric, and whatever these stand on."""
        steps = self.steps()
        needed: set[int] = set()
        for step in {*steps[-keep:], *([] if best is None else self.best(best)[:1])}:
            needed.add(step)
            needed.update(step_of(base.name) or 0 for base in self.read(step).manifest.base)
        for step in reversed(steps):  # none is ever left without what it stands on
            if step not in needed:
                self._remove(self.path / name_of(step))

    def best(self, metric: str) -> list[int]:
        """Steps that have the metric, best first; one that is damaged has none."""
        scored = []
        for step in self.steps():
            value = None
            with suppress(CheckpointError):
                value = self.read(step).manifest.metrics.get(metric)
            if value is not None:
                scored.append((value if metric in LESS_IS_BETTER else -value, -step))
        return [-step for _, step in sorted(scored)]

    def _remove(self, path: Path) -> None:
        gone = path.with_name(f".removing-{path.name}")
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)
        sync_directory(self.path)
        shutil.rmtree(gone, ignore_errors=True)
