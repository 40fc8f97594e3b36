"""A process that dies anywhere while it writes a checkpoint leaves the previous one intact, and the run resumes from it.

The process dies at every file operation in turn: of the checkpoint, of its commit, and of the removal of old ones.  It dies
before the operation, and in the middle of a write.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import nestpipe
import samples
from fork_server import Child
from nestpipe.checkpoint.folder import Folder
from nestpipe.checkpoint.load import restore
from nestpipe.checkpoint.writer import CheckpointWriter
from nestpipe.comm.world import World
from nestpipe.pipeline.pipeline import TrainPipeline
from nestpipe.train.digest import digest
from training import Setting, make_pipeline

SETTING = Setting("dlrm", nestpipe.RowWiseAdagrad(0.1), steps=5, dtype="float32")
AUDITED = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
KEEP, FULL_EVERY = 1, 2
DIED = 77


def train(pipeline: TrainPipeline, until: int) -> None:
    batches = iter([samples.batch("dlrm", step, "float32") for step in SETTING.batches()[pipeline.next_batch : until]])
    while pipeline.progress(batches):
        pass


def save(pipeline: TrainPipeline, writer: CheckpointWriter) -> None:
    writer.save({}, {})
    writer.wait()


class Doom:
    """Ends this process at the `at`-th file operation inside `folder`."""

    def __init__(self, at: int, folder: Path) -> None:
        self._left = at
        self._folder = str(folder)
        self._write = os.write
        sys.addaudithook(self._hear)
        os.write = self._writing  # type: ignore[assignment]
        os.fsync = self._syncing

    def _tick(self) -> bool:
        self._left -= 1
        return self._left < 0

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        ours = event in AUDITED and (str(args[0]).startswith(self._folder) or event in ("os.remove", "os.rmdir"))
        if ours and self._tick():
            os._exit(DIED)

    def _writing(self, file: int, data: memoryview) -> int:
        if self._tick():
            fcntl.fcntl(
                file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~os.O_DIRECT
            )  # so that it can tear anywhere
            self._write(file, data[: len(data) // 2])
            os._exit(DIED)
        return self._write(file, data)

    def _syncing(self, file: int) -> None:
        """Only counts: a dying process loses nothing that it did not sync, and a real sync is slow."""
        if self._tick():
            os._exit(DIED)


def attack(folder: str, saves: int) -> None:
    os.fsync = lambda file: None
    _attack(folder, saves)


def _attack(folder: str, saves: int) -> None:
    """Commits checkpoints of steps 1..saves, attacks the next.  Runs in a process without threads, which can be forked."""
    world = World.single()
    original, path = Path(folder) / "original", Path(folder) / "attacked"
    original.mkdir()
    pipeline = make_pipeline(world, SETTING)
    writer = CheckpointWriter(pipeline, Folder(original), keep=KEEP, full_every=FULL_EVERY)
    digests = {0: digest(pipeline)}
    for step in range(1, saves + 2):
        train(pipeline, step)
        digests[step] = digest(pipeline)
        if step <= saves:
            save(pipeline, writer)
    writer.folder = Folder(path)
    final = make_pipeline(world, SETTING)
    train(final, SETTING.steps)
    digests[SETTING.steps] = digest(final)
    outcomes: list[int] = []
    seen: set[tuple[str, ...]] = set()
    for at in range(1000):
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(original, path)
        child = os.fork()
        if child == 0:
            Doom(at, path)
            save(pipeline, writer)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, DIED), f"operation {at}: {code}"
        outcomes.append(look(world, Folder(path), digests, saves, at))
        names = tuple(sorted(entry.name for entry in path.iterdir()))
        if names not in seen:  # resuming takes longer than looking, and depends only on what is left
            seen.add(names)
            resume(world, Folder(path), digests, outcomes[-1], at)
        if code == 0:
            break
    else:
        raise AssertionError("the checkpoint never ended")
    assert outcomes[0] == saves and outcomes[-1] == saves + 1 and sorted(outcomes) == outcomes, outcomes
    assert outcomes.count(saves) > 15 and outcomes.count(saves + 1) >= 1 + (saves == 2) * 10, outcomes


def look(world: World, folder: Folder, digests: dict[int, str], saves: int, at: int) -> int:
    """Asserts that the last checkpoint is the previous or the new one, to the bit.  Returns its step."""
    found = folder.find()
    step = found.manifest.step if found else 0
    assert step in (saves, saves + 1), f"operation {at}: step {step}"
    if found:
        resumed = make_pipeline(world, SETTING)
        restore(resumed, folder.chain(found))
        assert digest(resumed) == digests[step], f"operation {at}: another digest at step {step}"
    return step


def resume(world: World, folder: Folder, digests: dict[int, str], step: int, at: int) -> None:
    """Asserts that the next run removes leftovers, and ends with the bits of an uninterrupted one."""
    folder.lock()
    folder.tidy()
    folder.rewind_to(step)
    left = [path.name for path in folder.path.iterdir() if not path.name.startswith(("step-", ".lock"))]
    assert not left, f"operation {at}: {left}"
    found = folder.find()
    resumed = make_pipeline(world, SETTING)
    chain = folder.chain(found) if found else []
    if chain:
        restore(resumed, chain)
    writer = CheckpointWriter(resumed, folder, keep=KEEP, full_every=FULL_EVERY, loaded=chain)
    train(resumed, SETTING.steps)
    assert digest(resumed) == digests[SETTING.steps], f"operation {at}: another digest at the end"
    save(resumed, writer)
    last = folder.find()
    assert last is not None and last.manifest.step == SETTING.steps
    whole = {path.name for path in folder.path.glob("step-*")}
    assert whole == {one.path.name for one in folder.chain(last)}, f"operation {at}: {whole} are kept"
    folder.unlock()


@pytest.mark.slow
@pytest.mark.parametrize(
    "saves",
    [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)],
    ids=["first", "incremental", "full, which removes two"],
)
def test_a_death_at_any_file_operation_leaves_the_previous_checkpoint(tmp_path: Path, saves: int) -> None:
    assert Child(attack, (str(tmp_path), saves)).join(120) == 0
