"""The folder of a run's checkpoints: commits, chains of incremental checkpoints, retention.

Names that begin with a dot are work in progress: `.writing-…` becomes a checkpoint by one rename,
`.removing-…` was one.
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

from nestpipe.checkpoint.errors import RECOVERY_HINT, CheckpointError
from nestpipe.checkpoint.manifest import COMMIT, Base, Manifest, name_of, read_manifest, step_of, sync_directory

log = logging.getLogger("nestpipe.checkpoint")

LOCK = ".lock"
LOCK_SECONDS = 10.0
LESS_IS_BETTER = ("loss", "log_loss", "ne")


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    path: Path
    manifest: Manifest
    digest: str

    @property
    def base(self) -> Base:
        """How the manifest of an incremental checkpoint refers to this one."""
        return Base(self.path.name, self.digest)


class Folder:
    """Any process may read it.  Only worker 0 writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None

    def lock(self, seconds: float = LOCK_SECONDS) -> None:
        """Called by worker 0 before it changes anything: no two processes may train one run.  Ends with the process."""
        self.path.mkdir(parents=True, exist_ok=True)
        file = (self.path / LOCK).open("a")
        until = time.monotonic() + seconds  # a process that was just killed may not be gone yet
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

    def steps(self) -> list[int]:
        """Steps of the directories that have a COMMIT file, ascending.  Does not read them."""
        if not self.path.is_dir():
            return []
        found = ((step_of(path.name), path) for path in self.path.iterdir())
        return sorted(step for step, path in found if step is not None and (path / COMMIT).is_file())

    def read(self, step: int) -> Checkpoint:
        path = self.path / name_of(step)
        manifest, digest = read_manifest(path)
        if manifest.step != step:
            raise CheckpointError(
                f"{path} is the checkpoint of step {manifest.step}: it was renamed; give it its own name back"
            )
        return Checkpoint(path, manifest, digest)

    def find(self, step: int | None = None) -> Checkpoint | None:
        """The checkpoint of a step, or the last one; None if the folder has none.

        CheckpointError if it is damaged: resuming silently from an older one would lose work.
        """
        steps = self.steps()
        if step is None:
            return self.read(steps[-1]) if steps else None
        if step not in steps:
            known = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(f"no checkpoint of step {step} in {self.path}; it has {known}")
        return self.read(step)

    def chain(self, last: Checkpoint) -> list[Checkpoint]:
        """The checkpoints to apply, in order, to restore `last`: a full one, and the incremental ones after it."""
        found: list[Checkpoint] = []
        for base in last.manifest.base:
            step = step_of(base.name)
            assert step is not None
            one = self.read(step)
            if one.digest != base.sha256:
                raise CheckpointError(
                    f"{base.name}, the base of {last.path}, was replaced by another checkpoint of the same step; "
                    "resume from another checkpoint with --from STEP"
                )
            if one.manifest.base != last.manifest.base[: len(found)]:
                what = "is not a full checkpoint" if not found else "has another base"
                raise CheckpointError(f"{base.name}, in the base of {last.path}, {what}; {RECOVERY_HINT}")
            if [replace(group, rows=0) for group in one.manifest.groups] != [
                replace(group, rows=0) for group in last.manifest.groups
            ]:
                raise CheckpointError(f"{base.name}, in the base of {last.path}, has other tables; {RECOVERY_HINT}")
            found.append(one)
        return [*found, last]

    def writing(self, step: int) -> Path:
        """The directory for a checkpoint's files until its commit."""
        return self.path / f".writing-{name_of(step)}"

    def start_writing(self, step: int) -> None:
        """Any worker may call it."""
        self.writing(step).mkdir(parents=True, exist_ok=True)

    def commit(self, step: int) -> Path:
        """Commits by one rename, after everything in the directory is on disk.  CheckpointError if the step exists."""
        final = self.path / name_of(step)
        if final.exists():
            raise CheckpointError(f"{final} already exists: use another folder, or train another step first")
        self.writing(step).rename(final)
        sync_directory(self.path)
        return final

    def tidy(self) -> None:
        """Removes checkpoints that an earlier process left half written or half removed."""
        if self.path.is_dir():
            for path in [*self.path.glob(".writing-*"), *self.path.glob(".removing-*")]:
                shutil.rmtree(path, ignore_errors=True)

    def rewind_to(self, step: int) -> None:
        """Removes the checkpoints of later steps, because the run resumes from this one.

        The last one goes first, so an interruption leaves no checkpoint without its base.
        """
        there = [(step_of(path.name), path) for path in self.path.iterdir()] if self.path.is_dir() else []
        for _, path in sorted(((at, path) for at, path in there if at is not None and at > step), reverse=True):
            self._remove(path)

    def prune(self, keep: int, best: str | None) -> None:
        """Removes all but the last `keep` checkpoints, the best by metric, and the bases of these."""
        steps = self.steps()
        needed: set[int] = set()
        for step in {*steps[-keep:], *([] if best is None else self.best(best)[:1])}:
            needed.add(step)
            needed.update(step_of(base.name) or 0 for base in self.read(step).manifest.base)
        for step in reversed(steps):  # from the last, so that none is ever left without its base
            if step not in needed:
                self._remove(self.path / name_of(step))

    def best(self, metric: str) -> list[int]:
        """Steps that have the metric, best first.  Skips damaged checkpoints."""
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
