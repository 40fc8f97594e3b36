"""Faults while a checkpoint is written: one line on all workers, earlier ones untouched, nothing half written left."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import nestpipe.train.checkpoints
from nestpipe.checkpoint import direct_file, writer
from nestpipe.checkpoint.errors import CheckpointError, NotWritten
from nestpipe.checkpoint.folder import Folder
from nestpipe.checkpoint.tensors import Written
from nestpipe.checkpoint.writer import CheckpointWriter
from nestpipe.comm.errors import PeerLost
from nestpipe.comm.world import World
from nestpipe.pipeline.pipeline import TrainPipeline
from nestpipe.train.checkpoints import refuse_others
from runs import EVERY, digest_at, log_of, recipe_of, resume, small, steps_in, train_run
from workers import Died, run, run_once


def full_disk(world: World, folder: str, rank: int, after: int) -> tuple[str, str]:
    """Trains with a disk of worker `rank` that is full after so many writes.  Returns what each worker raised."""
    real, written = direct_file.write_all, [0]

    def write_all(file: int, view: memoryview) -> None:
        written[0] += 1
        if written[0] > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, view)

    if world.rank == rank:
        direct_file.write_all = write_all
    try:
        train_run(world, "dlrm", small("dlrm", EVERY), folder)
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        direct_file.write_all = real
        world.leave()  # as its process would: who still waits for it is told at once
    return "", "nothing"


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "after"), [(0, 16), (1, 5)])
def test_a_full_disk_is_named_with_its_worker(tmp_path: Path, rank: int, after: int) -> None:
    """Both workers name the same worker; committed checkpoints are intact; no half-written directory is left."""
    found = run_once(2, full_disk, str(tmp_path / "run"), rank, after, timeout=30.0, deadline=60.0)
    messages = {text for kind, text in found if kind == "NotWritten"}
    assert len(messages) == 1 and {kind for kind, _ in found} <= {"NotWritten", "PeerLost"}, found
    assert f"was not written: rank {rank}: No space left on device: make room, or set checkpoint.path" in messages.pop()
    steps = steps_in(tmp_path / "run")
    assert steps and not list((tmp_path / "run" / "checkpoints").glob(".writing-*"))
    run(2, digest_at, "dlrm", small("dlrm", EVERY), str(tmp_path / "run"), steps[-1])


def test_a_directory_that_cannot_be_created_costs_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new checkpoint cannot even create its directory: all others are still there."""

    def refuse(self: Folder, step: int) -> None:
        if step > 8:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        self.writing(step).mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(Folder, "start_writing", refuse)
    with pytest.raises(NotWritten, match="rank 0: Disk quota exceeded"):
        train_run(World.single(), "dlrm", small("dlrm", EVERY), str(tmp_path / "run"))
    assert steps_in(tmp_path / "run") == [3, 6]


def slow_disk(world: World, folder: str) -> list[int]:
    """Worker 1's disk takes longer for a file than the timeout between workers."""
    real = writer.write_tensors

    def write_tensors(path: Path, named: Any) -> Written:
        time.sleep(2.5 * (path.name == "worker1.safetensors"))
        return real(path, named)

    writer.write_tensors = write_tensors  # type: ignore[assignment]
    train_run(world, "dlrm", small("dlrm", "train.steps=4", "checkpoint.every_steps=3"), folder)
    return steps_in(folder)


@pytest.mark.slow
def test_a_disk_may_be_slower_than_the_timeout(tmp_path: Path) -> None:
    """The timeout of 2 s is for workers that do not answer, not for those that write."""
    assert run_once(2, slow_disk, str(tmp_path / "run"), timeout=2.0) == [[3, 4]] * 2


def gone_while_waited_for(world: World, folder: str) -> str:
    """Worker 1 stops answering while worker 0 waits for it with its part of a checkpoint, and ends when worker 0 has noticed."""
    real, noticed = writer.CheckpointWriter.wait, Path(folder).with_name("noticed")

    def stall(*_: object) -> None:
        while not noticed.exists():
            time.sleep(0.02)
        os._exit(5)

    def wait(self: writer.CheckpointWriter) -> None:
        if self._thread is not None:
            stall()
        real(self)

    if world.rank == 1:
        writer.CheckpointWriter.wait = wait  # type: ignore[method-assign]
        writer.write_tensors = stall  # type: ignore[assignment]
    try:
        train_run(world, "dlrm", small("dlrm", "train.steps=3", "checkpoint.every_steps=3"), folder)
    except PeerLost as error:
        return str(error)
    finally:
        noticed.touch()
    return "nothing"


@pytest.mark.slow
def test_a_worker_that_stalls_while_a_checkpoint_is_written_is_noticed(tmp_path: Path) -> None:
    """By the same deadline as in training, though a disk may take an hour."""
    said, died = run_once(2, gone_while_waited_for, str(tmp_path / "run"), timeout=2.0)
    assert died == Died(5), "it stalled until then"
    assert said.startswith("rank 0 waited 2 s for another worker"), said
    assert not steps_in(tmp_path / "run")


@pytest.mark.slow
def test_time_based_checkpoints_follow_a_monotonic_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock jumps by days at every look; by the monotonic clock a minute passes every third step."""
    days = iter(range(1, 10**6))
    monkeypatch.setattr(time, "time", lambda: 1.7e9 + (-1) ** next(days) * 86400 * next(days))
    untouched = train_run(World.single(), "dlrm", small("dlrm"), str(tmp_path / "untouched"))
    looks = iter(range(10**6))
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 20.1 * next(looks))
    monkeypatch.setattr(nestpipe.train.checkpoints, "time", clock)
    settings = small("dlrm", "checkpoint.every_minutes=1", "checkpoint.keep=99")
    summary = train_run(World.single(), "dlrm", settings, str(tmp_path / "run"))
    steps = steps_in(tmp_path / "run")
    assert 4 <= len(steps) <= 12 and steps[-1] == 30 and summary["digest"] == untouched["digest"], steps
    created = [
        json.loads((tmp_path / f"run/checkpoints/step-{s:08d}/manifest.json").read_text())["created"] for s in steps
    ]
    assert all(datetime.fromisoformat(text) for text in created)


def test_the_wall_clock_triggers_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    days = iter(range(1, 10**6))
    monkeypatch.setattr(time, "time", lambda: 1.7e9 + 86400 * next(days))
    settings = small("dlrm", "checkpoint.every_minutes=10", "checkpoint.keep=99")
    train_run(World.single(), "dlrm", settings, str(tmp_path / "run"))
    assert steps_in(tmp_path / "run") == [30], "only the final one"


def test_one_run_at_a_time(tmp_path: Path) -> None:
    """A second process cannot resume a run in progress.  A new run does not write into another's checkpoints."""
    train_run(World.single(), "dlrm", small("dlrm", EVERY), str(tmp_path / "run"))
    path = tmp_path / "run" / "checkpoints"
    first, second = Folder(path), Folder(path)
    first.lock()
    with pytest.raises(CheckpointError, match="in use by another process"):
        second.lock(0.1)
    first.unlock()
    second.lock(0.1)
    with pytest.raises(
        CheckpointError, match="already has checkpoints, the last of step 30: resume that run with --resume"
    ):
        refuse_others(recipe_of("dlrm", small("dlrm", EVERY, f"checkpoint.path='{path}'")), tmp_path / "other")


def test_a_damaged_old_checkpoint_does_not_end_a_run(tmp_path: Path) -> None:
    """Damage to a checkpoint that is not needed is no reason to stop writing new ones."""
    settings = small("dlrm", EVERY, "checkpoint.best=auc", "checkpoint.keep=2", "checkpoint.full_every=1")
    train_run(World.single(), "dlrm", [*settings, "train.steps=7"], str(tmp_path / "run"))
    oldest = steps_in(tmp_path / "run")[0]
    (tmp_path / "run" / "checkpoints" / f"step-{oldest:08d}" / "manifest.json").write_text("{}")
    resume(World.single(), "dlrm", settings, str(tmp_path / "run"))
    assert steps_in(tmp_path / "run")[-1] == 30 and oldest not in steps_in(tmp_path / "run")
    assert [line["checkpoint"]["step"] for line in log_of(tmp_path / "run") if "checkpoint" in line][-1] == 30


def fails_while_writing(world: World, folder: str) -> list[int]:
    """Trains a run whose third step fails while the checkpoint of the second is written.  Returns the saved steps."""
    real_write, real_progress, writing = CheckpointWriter._write_files, TrainPipeline.progress, threading.Event()

    def slow_write(self: CheckpointWriter, *arguments: Any) -> None:
        writing.set()
        time.sleep(0.5)
        real_write(self, *arguments)

    def failing_progress(self: TrainPipeline, batches: Any) -> Any:
        if self.next_batch == 2:
            assert writing.wait(30)
            raise OSError(errno.ENOSPC, "the disk tier is full")
        return real_progress(self, batches)

    CheckpointWriter._write_files, TrainPipeline.progress = slow_write, failing_progress  # type: ignore[method-assign]
    try:
        with pytest.raises(OSError, match="the disk tier is full"):
            train_run(world, "dlrm", [*small("dlrm"), "checkpoint.every_steps=2"], folder)
    finally:
        CheckpointWriter._write_files, TrainPipeline.progress = real_write, real_progress  # type: ignore[method-assign]
    assert not [path.name for path in (Path(folder) / "checkpoints").glob(".writing*")]
    return steps_in(Path(folder))


def test_a_run_that_fails_while_a_checkpoint_is_written_still_commits_it(tmp_path: Path) -> None:
    """Promise: nothing half written, and the run can resume from the step that was being saved."""
    assert run_once(1, fails_while_writing, str(tmp_path / "run"), timeout=30.0) == [[2]]
