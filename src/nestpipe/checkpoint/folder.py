"""The folder of a run's checkpoints: commits, chains of incremental checkpoints, retention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from nestpipe.checkpoint.errors import RECOVERY_HINT, CheckpointError
from nestpipe.checkpoint.local_storage import LocalStorage
from nestpipe.checkpoint.manifest import Base, Manifest, name_of, read_manifest, step_of
from nestpipe.checkpoint.plain_file import Place
from nestpipe.checkpoint.remote_storage import RemoteStorage
from nestpipe.checkpoint.storage import LOCK_SECONDS, Found, Storage
from nestpipe.files import Location

LESS_IS_BETTER = ("loss", "log_loss", "ne")


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint."""

    path: Place
    manifest: Manifest
    digest: str

    @property
    def base(self) -> Base:
        """How the manifest of an incremental checkpoint refers to this one."""
        return Base(name_of(self.manifest.step), self.digest)


class Folder:
    """Any process may read it.  Only worker 0 writes."""

    def __init__(self, path: Place) -> None:
        self._storage: Storage = RemoteStorage(path) if isinstance(path, Location) else LocalStorage(path)
        self.path = path
        self.attempt = ""
        """Of the checkpoint that is being written; new for each, and equal on all workers."""

    def lock(self, seconds: float = LOCK_SECONDS) -> None:
        """Called by worker 0 before it changes anything: no two processes may train one run.  Ends with the process."""
        self._storage.lock(seconds)

    def unlock(self) -> None:
        self._storage.unlock()

    def found(self) -> list[Found]:
        """All directories that are checkpoints, or look like one, by name."""
        return self._storage.found()

    def steps(self) -> list[int]:
        """Steps of the directories that have a COMMIT file, ascending.  Does not read them."""
        return sorted({one.step for one in self.found() if one.step is not None and not one.problem})

    def read(self, step: int) -> Checkpoint:
        path = self._storage.place_of(step)
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

    def writing(self, step: int) -> Place:
        """The directory for a checkpoint's files until its commit."""
        return self._storage.writing(step, self.attempt)

    def start_writing(self, step: int) -> None:
        """Any worker may call it."""
        self._storage.start_writing(self.writing(step))

    def commit(self, step: int, manifest: Manifest) -> Base:
        """Commits by one act, after all files are there.  Returns how an incremental one refers to it.

        CheckpointError if the step exists.
        """
        return Base(name_of(step), self._storage.commit(step, self.writing(step), manifest))

    def discard(self, step: int) -> None:
        """Removes what was written and not committed.  Raises nothing."""
        self._storage.discard(self.writing(step))

    def tidy(self) -> None:
        """Removes checkpoints that an earlier process left half written or half removed."""
        self._storage.tidy()

    def rewind_to(self, step: int) -> None:
        """Removes the checkpoints of later steps, because the run resumes from this one.

        The last one goes first, so an interruption leaves no checkpoint without its base.
        """
        self._remove(lambda at: at > step)

    def prune(self, keep: int, best: str | None) -> None:
        """Removes all but the last `keep` checkpoints, the best by metric, and the bases of these."""
        steps = self.steps()
        needed: set[int] = set()
        for step in {*steps[-keep:], *([] if best is None else self.best(best)[:1])}:
            needed.add(step)
            needed.update(step_of(base.name) or 0 for base in self.read(step).manifest.base)
        self._remove(lambda at: at in steps and at not in needed)

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

    def _remove(self, which: Callable[[int], bool]) -> None:
        """Removes from the last, so that none is ever left without its base."""
        there = [(one.step, one.name, one.place) for one in self.found() if one.step is not None and which(one.step)]
        for _, _, place in sorted(there, key=lambda one: one[:2], reverse=True):
            self._storage.remove(place)
