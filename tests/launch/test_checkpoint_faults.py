"""SIGTERM, a full disk, a damaged checkpoint, other workers: each has one answer, in time, and the run can be gone on with."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from commands import DEADLINE, MODULE, Command, nestpipe, one_line, refused, small, until
from nestpipe.checkpoint.folder import Folder
from nestpipe.comm.world import World
from runs import digest_at, resume, train_run
from workers import run

pytestmark = pytest.mark.slow

LENGTH = ["data.samples=20000", "train.log_every=1", "train.steps=150"]
EVERY = ["checkpoint.every_steps=5", "checkpoint.full_every=3"]
SLOW = ["data.samples=100000", "data.features=4", "model.forward_ms=1500", "model.backward_ms=1500", "model.samples=64",
        "train.batch_size=64", "train.log_every=1", "model.dense_parameters=1000"]  # fmt: skip


def settings_of(arguments: list[str]) -> list[str]:
    return [part for part in arguments if "=" in part]


@cache
def untouched(workers: int = 1) -> str:
    settings = settings_of(small(*LENGTH))
    with tempfile.TemporaryDirectory() as folder:
        return str(run(workers, train_run, "dlrm", settings, f"{folder}/run")[0]["digest"])


def gone_on_with(path: Path, workers: int = 1, from_step: int | None = None) -> str:
    settings = settings_of(small(*LENGTH, *EVERY))
    return str(run(workers, resume, "dlrm", settings, str(path), from_step)[0]["digest"])


def half_done(path: Path) -> list[str]:
    return [
        entry.name for entry in (path / "checkpoints").iterdir() if entry.name.startswith((".writing", ".removing"))
    ]


@pytest.mark.parametrize("every", ["checkpoint.every_steps=1000", "checkpoint.every_steps=1"], ids=["idle", "writing"])
def test_sigterm_saves_and_ends_well(tmp_path: Path, every: str) -> None:
    """One process: exit 0 before the last step, a line that says how to resume, in the end the digest of an untouched run; also
    where a checkpoint is being written at nearly any moment."""
    command = Command(tmp_path, small(*LENGTH, every, "pipeline.schedule=nested"))
    command.once_training(0)
    os.kill(command.pid, signal.SIGTERM)
    ended = command.wait()
    assert ended.code == 0, ended.err
    assert ended.err.startswith("nestpipe: stopped; step ") and ended.err.strip().endswith(f"{command.run} --resume")
    found = Folder(command.run / "checkpoints").find()
    assert found is not None and f"step {found.manifest.step} is saved" in ended.err and not half_done(command.run)
    assert not (command.run / "summary.json").exists()
    assert gone_on_with(command.run) == untouched()


def test_sigterm_to_the_launcher_and_other_workers_afterwards(tmp_path: Path) -> None:
    """Two workers save together and end with exit 0; `--resume --workers 1` then goes on with what two have left."""
    command = Command(tmp_path, small(*LENGTH, *EVERY, workers=2))
    command.once_training(2)
    os.kill(command.pid, signal.SIGTERM)
    ended = command.wait()
    assert ended.code == 0, ended.err
    assert ended.err.count("\n") == 1 and ended.err.startswith("nestpipe: stopped; step "), ended.err
    shutil.copytree(command.run, tmp_path / "copy")
    assert gone_on_with(tmp_path / "copy", 2) == untouched(2)
    summary = nestpipe(
        tmp_path,
        "train",
        str(command.run),
        "--resume",
        "--workers",
        "1",
        "--quiet",
        "--json",
        "-",
        run=command.run.name,
    ).summary()
    assert summary["workers"] == 1 and summary["samples"] == 20000 and summary["steps"] == 100


def test_three_workers_go_on_as_two(tmp_path: Path) -> None:
    """Through the command line and its launcher, all new interpreters: the run of three is read by two, and ends with all
    samples trained once."""
    settings = settings_of(small("train.log_every=1", "checkpoint.every_steps=3"))
    run(3, train_run, "dlrm", [*settings, "train.steps=4"], str(tmp_path / "run"))
    command = Command(tmp_path, ["train", str(tmp_path / "run"), "--resume", "--workers", "2", "--quiet", "--json", "-",
                                 "--set", "train.steps=none"], run="run", cold=MODULE)  # fmt: skip
    summary = command.wait().summary()
    assert summary["workers"] == 2 and summary["samples"] == 2000


def test_a_second_sigterm_means_at_once(tmp_path: Path) -> None:
    """While a batch of three seconds is finished for the first one."""
    arguments = ["train", "timed", *(f"--set={s}" for s in [*SLOW, *EVERY]), "--workers", "1", "--quiet"]
    command = Command(tmp_path, arguments)
    command.once_training(0)
    os.kill(command.pid, signal.SIGTERM)
    time.sleep(0.3)
    os.kill(command.pid, signal.SIGTERM)
    ended = command.wait()
    assert ended.code != 0 and "is saved" not in ended.err and not half_done(command.run)


def test_sigterm_has_a_deadline(tmp_path: Path) -> None:
    """A batch that takes longer than checkpoint.stop_seconds: ended then, with a line that names the setting."""
    arguments = ["train", "timed", *(f"--set={s}" for s in [*SLOW, *EVERY]), "--workers", "1", "--quiet"]
    command = Command(tmp_path, [*arguments, "--set", "checkpoint.stop_seconds=0.5"])
    command.once_training(0)
    os.kill(command.pid, signal.SIGTERM)
    ended = command.wait()
    assert ended.code == 143
    refused(ended, "stopped with nothing new saved", "checkpoint.stop_seconds, 0.5")


def test_sigterm_before_the_first_step(tmp_path: Path) -> None:
    """Nothing could be saved: one line, exit 1, no process left."""
    command = Command(tmp_path, small(*LENGTH, *EVERY, workers=2), cold_workers=True)
    assert until(DEADLINE, lambda: len(command.workers()) == 2)
    os.kill(command.pid, signal.SIGTERM)
    ended = command.wait()
    refused(ended, "stopped by SIGTERM")
    assert ended.code == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_ends_the_run_and_costs_no_checkpoint(tmp_path: Path, small_disk: Path) -> None:
    """All checkpoints are kept until the disk is full: one line with rank and cause, exit 1, the last commit can be loaded and,
    with room, gone on from."""
    place = ["checkpoint.keep=99", f"checkpoint.path='{small_disk / 'kept'}'"]
    command = Command(tmp_path, small(*LENGTH, *EVERY, *place))
    ended = command.wait()
    refused(ended, "rank 0: No space left on device", "checkpoint.path", "earlier checkpoints are untouched")
    folder = Folder(small_disk / "kept")
    assert ended.code == 1 and folder.steps() and not list(folder.path.glob(".writing-*"))
    shutil.copytree(folder.path, command.run / "checkpoints")
    assert gone_on_with(command.run) == untouched()


def test_a_full_disk_tier_ends_the_run_and_costs_no_checkpoint(tmp_path: Path, small_disk: Path) -> None:
    """Rows no longer fit: one line that names the setting, exit 1, and the run goes on elsewhere from its last checkpoint."""
    tier = [f"tables.disk_path='{small_disk}'", "tables.dram_rows=64", "data.ids=100000", "model.dim=64"]
    command = Command(tmp_path, small(*LENGTH, *EVERY, *tier))
    ended = command.wait()
    refused(ended, "No space left on device", "tables.disk_path")
    found = Folder(command.run / "checkpoints").find()
    assert ended.code == 1 and found is not None and not half_done(command.run)
    settings = settings_of(small(*LENGTH, *EVERY, "data.ids=100000", "model.dim=64"))
    run(1, digest_at, "dlrm", settings, str(command.run))


def damaged(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "cut off":
        path.write_bytes(data[: len(data) // 2])
    elif how == "one bit":
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes(data))
    elif how == "foreign":
        path.write_bytes(b"PK\x03\x04" + bytes(data[4:]))
    else:
        path.unlink()


def test_a_damaged_checkpoint_is_refused_and_an_older_one_helps(tmp_path: Path) -> None:
    """Any file of it cut off, changed by one bit, of another kind or gone: one line that names it, nothing of the run is changed;
    --from an older step ends with the digest of an untouched run."""
    run(
        1,
        train_run,
        "dlrm",
        [*settings_of(small(*LENGTH, *EVERY)), "train.steps=22", "checkpoint.keep=9"],
        str(tmp_path / "run"),
    )
    folder = Folder(tmp_path / "run" / "checkpoints")
    last = folder.find()
    assert last is not None and last.manifest.step == 22
    for file in ["manifest.json", "COMMIT", *(file.name for file in last.manifest.files)]:
        for how in ("cut off", "one bit", "foreign", "gone"):
            if (file, how) == ("COMMIT", "gone"):
                continue  # that is no checkpoint at all
            copy = tmp_path / "copy"
            shutil.copytree(tmp_path / "run", copy)
            damaged(copy / "checkpoints" / last.path.name / file, how)
            before = {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file()}
            with pytest.raises(ValueError, match=last.path.name) as caught:
                resume(World.single(), "dlrm", settings_of(small(*LENGTH, *EVERY)), str(copy))
            assert "\n" not in str(caught.value), f"{file} {how}"
            assert before == {path: path.stat().st_mtime_ns for path in copy.rglob("*") if path.is_file()}, (
                f"{file} {how}"
            )
            shutil.rmtree(copy)
    rows = next(file.name for file in last.manifest.files if file.kind == "rows")
    damaged(last.path / rows, "one bit")
    ended = nestpipe(tmp_path, "train", str(tmp_path / "run"), "--resume", "--workers", "1", "--quiet", run="run")
    refused(ended, rows, "is damaged", "--from STEP")
    assert ended.code == 2
    one_line(
        nestpipe(
            tmp_path, "train", str(tmp_path / "run"), "--resume", "--from", "7", "--workers", "1", "--quiet", run="run"
        )
    )
    again = ["--resume", "--from", "20", "--workers", "1", "--quiet", "--json", "-", "--set", "train.steps=150"]
    ended = nestpipe(tmp_path, "train", str(tmp_path / "run"), *again, run="run")
    assert ended.summary()["digest"] == untouched()
