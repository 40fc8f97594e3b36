"""Promise: checkpoints on object storage are committed by one act, resumed bit for bit, and kept and removed as on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nestpipe
import samples
from commands import Command
from commands import small as small_run
from made import CHANGED, FULL, make
from nestpipe.checkpoint import lease as leases
from nestpipe.checkpoint.errors import CheckpointError, NotWritten
from nestpipe.checkpoint.folder import Folder
from nestpipe.checkpoint.lease import Lease, Owner
from nestpipe.checkpoint.load import restore
from nestpipe.checkpoint.places import place_at
from nestpipe.checkpoint.vector_files import VectorsError, read_vectors
from nestpipe.checkpoint.writer import CheckpointWriter
from nestpipe.cli.main import main
from nestpipe.comm.world import World
from nestpipe.files import FileError, Location
from nestpipe.pipeline.pipeline import TrainPipeline
from nestpipe.train.digest import digest
from object_storage import Server, serving
from runs import EVERY, resume, small, train_run
from training import Setting, make_pipeline
from workers import run

SETTING = Setting("dlrm", nestpipe.RowWiseAdagrad(0.1), steps=6, dtype="float32")


@pytest.fixture(scope="module")
def bucket(storage: Server) -> str:
    return storage.bucket("kept")


@pytest.fixture(autouse=True)
def quick_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("BEAT_SECONDS", 0.1), ("LEASE_SECONDS", 1.0), ("SETTLE_SECONDS", 0.02)):
        monkeypatch.setattr(leases, name, value)


def train(pipeline: TrainPipeline, until: int) -> None:
    batches = iter([samples.batch("dlrm", step, "float32") for step in SETTING.batches()[pipeline.next_batch : until]])
    while pipeline.progress(batches):
        pass


def trained(path: Location, **options: Any) -> tuple[TrainPipeline, CheckpointWriter, dict[int, str]]:
    """Saved after each of the first four steps, and the digests then."""
    pipeline = make_pipeline(World.single(), SETTING)
    writer = CheckpointWriter(pipeline, Folder(path), **options)
    digests = {}
    for step in range(1, 5):
        train(pipeline, step)
        digests[step] = digest(pipeline)
        writer.save({}, {"metrics": {"auc": 1 - abs(step - 2) / 10}})
        writer.wait()
    return pipeline, writer, digests


def loaded(folder: Folder, step: int | None = None) -> str:
    last = folder.find(step)
    assert last is not None
    pipeline = make_pipeline(World.single(), SETTING)
    restore(pipeline, folder.chain(last))
    return digest(pipeline)


def upload(folder: Path, to: Location) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            (to / str(file.relative_to(folder))).write(file.read_bytes())


def run_on_storage(world: World, folder: str, path: str, variables: dict[str, str]) -> list[Any]:
    os.environ.update(variables)
    untouched = train_run(world, "dlrm", small("dlrm"), f"{folder}/untouched")
    settings = small("dlrm", EVERY, "checkpoint.full_every=2", "checkpoint.keep=99", f"checkpoint.path='{path}'")
    train_run(world, "dlrm", [*settings, "train.steps=10"], f"{folder}/run")
    found = [resume(world, "dlrm", [*settings, "train.steps=13"], f"{folder}/run", 6)["steps"]]
    last = resume(world, "dlrm", settings, f"{folder}/run")
    return [*found, last["digest"] == untouched["digest"], last["steps"], Folder(Location(path)).steps()]


@pytest.mark.slow
def test_a_run_on_two_workers_resumes_bit_for_bit(storage: Server, bucket: str, tmp_path: Path) -> None:
    """Incremental checkpoints, going back to an earlier one, and on to the end: the digest of an untouched run."""
    found = run(2, run_on_storage, str(tmp_path), f"{bucket}/two", storage.variables)
    assert found[0] == found[1] == [13, True, 16, [3, 6, 9, 12, 13, 15, 16]]
    left = {key.split("/")[1] for key in storage.keys("kept", "two/")}
    assert all(name.startswith("step-") for name in left), left


def test_chains_retention_and_going_back(storage: Server, bucket: str) -> None:
    """Keeps the last, the best and their bases; every kept one restores its own step; going back removes the later."""
    place = Location(f"{bucket}/chains")
    _, writer, digests = trained(place, keep=1, full_every=3, best="auc")
    folder = Folder(place)
    assert folder.steps() == [1, 2, 4] and folder.best("auc") == [2, 1, 4]
    for step in folder.steps():
        assert loaded(folder, step) == digests[step]
    assert {key.split("/")[1][:13] for key in storage.keys("kept", "chains/")} == {f"step-{n:08d}" for n in (1, 2, 4)}
    with pytest.raises(NotWritten, match="step-00000004 already exists"):
        writer.save({}, {})
        writer.wait()
    assert loaded(folder) == digests[4]
    folder.rewind_to(2)
    assert folder.steps() == [1, 2]


class Died(BaseException):
    """Stands for the end of the process."""


class Doom:
    """Raises Died at the `at`-th change of an object, before it or after it."""

    def __init__(self, at: int, after: bool, patch: pytest.MonkeyPatch) -> None:
        self.left, self.after = at, after
        for name in ("write", "upload", "remove", "remove_folder"):
            patch.setattr(Location, name, self._dooming(getattr(Location, name)))

    def _dooming(self, act: Any) -> Any:
        def doomed(*args: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                if self.left == -1 and self.after:
                    act(*args)
                raise Died
            return act(*args)

        return doomed


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_death_at_any_change_leaves_the_previous_checkpoint(
    storage: Server, bucket: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the files, the manifest, the commit and the removal of old ones: the previous or the new one is found, whole."""
    outcomes = []
    for at in range(100):
        place = Location(f"{bucket}/doom-{after}-{at}")
        pipeline, writer, digests = trained(place, keep=1, full_every=2)
        train(pipeline, 5)
        digests[5] = digest(pipeline)
        with monkeypatch.context() as patch:
            doom = Doom(at, after, patch)
            try:
                writer.save({}, {})
                writer.wait()
            except (Died, NotWritten):
                pass
        folder = Folder(place)
        last = folder.find()
        assert last is not None and last.manifest.step in (4, 5), at
        assert loaded(folder) == digests[last.manifest.step], at
        outcomes.append(last.manifest.step)
        folder.tidy()
        names = {key.split("/")[1] for key in storage.keys("kept", f"{place.leaf}/")}
        assert names == {one.name for one in folder.found() if not one.problem}, at
        assert loaded(folder) == digests[last.manifest.step], at
        if doom.left >= 0:
            break
    assert sorted(outcomes) == outcomes and outcomes[0] == 4 and outcomes.count(4) >= 4 and outcomes.count(5) >= 4


def test_half_a_checkpoint_is_none(bucket: str, tmp_path: Path) -> None:
    """Without COMMIT, with a torn one, or with one that came without its manifest, there is no checkpoint."""
    make(tmp_path / "made")
    place = Location(f"{bucket}/halves")
    upload(tmp_path / "made", place)
    folder = Folder(place)
    assert folder.steps() == [FULL, CHANGED]
    (place / f"step-{CHANGED:08d}" / "COMMIT").write(b"torn")
    assert folder.steps() == [FULL]
    (place / "step-00000077.ab-1" / "COMMIT").write(b"0" * 64 + b"\n")
    assert folder.steps() == [FULL]
    assert [one.step for one in folder.found() if one.problem] == [CHANGED, 77]
    folder.tidy()
    assert [one.step for one in folder.found()] == [FULL]


def test_damage_is_named(bucket: str, tmp_path: Path) -> None:
    """A file that is missing, shorter or other than the manifest says is refused in one line that names it."""
    make(tmp_path / "made")
    place = Location(f"{bucket}/damaged")
    upload(tmp_path / "made", place)
    folder = Folder(place)
    last = folder.read(FULL)
    file = last.path / last.manifest.files[0].name
    assert isinstance(file, Location)
    data = file.read()
    from nestpipe.checkpoint.check import check_chain

    check_chain([last])
    file.write(b"x" + data[1:])
    with pytest.raises(CheckpointError, match=r"s3://kept/damaged/step-.* is damaged"):
        check_chain([last])
    file.write(data[1:])
    with pytest.raises(CheckpointError, match="bytes instead of"):
        folder.read(FULL)
    file.remove()
    with pytest.raises(CheckpointError, match=r"s3://kept/damaged/step-.* is missing"):
        folder.read(FULL)


def test_commands(bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ls, inspect, verify and export take the URL of a folder, of a checkpoint, or a run whose recipe names one."""
    make(tmp_path / "made")
    place = f"{bucket}/commands"
    upload(tmp_path / "made", Location(place))
    (Location(place) / "step-00000012.00-1" / "dense.safetensors").write(b"half")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text(f'name = "made"\n[checkpoint]\npath = "{place}"\n')
    for where in (place, str(tmp_path / "run")):
        assert main(["checkpoint", "ls", where, "--json", "-"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert [one["step"] for one in found["checkpoints"]] == [FULL, CHANGED] and found["path"] == place
        assert "not committed" in found["strays"][0]["why"]
        assert main(["checkpoint", "verify", where, "--all"]) == 0
        assert "is intact" in capsys.readouterr().out
    assert main(["checkpoint", "inspect", f"{place}/step-{FULL:08d}"]) == 0
    assert f"step {FULL}" in capsys.readouterr().out
    assert main(["checkpoint", "verify", place, "--step", "77"]) == 2
    assert "no checkpoint of step 77 in s3://kept/commands" in capsys.readouterr().err
    assert main(["checkpoint", "ls", f"{bucket}/nothing"]) == 2
    assert "no checkpoint in s3://kept/nothing" in capsys.readouterr().err
    for to in (f"{bucket}/tables/item.parquet", str(tmp_path / "item.parquet")):
        assert main(["checkpoint", "export", place, "--table", "item", "--to", to]) == 0
    assert Location(f"{bucket}/tables/item.parquet").read() == (tmp_path / "item.parquet").read_bytes()
    capsys.readouterr()
    assert main(["checkpoint", "export", place, "--table", "item", "--to", f"{bucket}/tables/item.parquet"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["checkpoint", "export", place, "--table", "item", "--to", f"{bucket}/item.npz"]) == 2
    assert "only .parquet can be written to object storage" in capsys.readouterr().err


def test_an_export_that_fails_leaves_no_object(storage: Server, bucket: str, tmp_path: Path) -> None:
    """Not even half of it appears."""
    make(tmp_path / "made")
    place = Location(f"{bucket}/failing")
    upload(tmp_path / "made", place)
    rows = next(file for file in Folder(place).read(FULL).manifest.files if file.kind == "rows")
    broken = place / f"step-{FULL:08d}" / rows.name
    broken.write(b"x" * rows.bytes)
    to = f"{bucket}/failed/item.parquet"
    assert main(["checkpoint", "export", place.name, "--table", "item", "--to", to]) == 2
    assert storage.keys("kept", "failed/") == []


@pytest.mark.parametrize("suffix", [".parquet", ".npz", ".npy"])
def test_initial_rows(bucket: str, tmp_path: Path, suffix: str) -> None:
    """tables.initial reads the same keys and vectors from object storage as from local disk."""
    make(tmp_path / "made")
    main(["checkpoint", "export", str(tmp_path / "made"), "--table", "item", "--to", str(tmp_path / f"item{suffix}")])
    upload(tmp_path, Location(f"{bucket}/initial"))
    dim = Folder(tmp_path / "made").read(FULL).manifest.groups[0].dim
    here, there = (
        list(read_vectors(place, dim, np.dtype(np.float32)))
        for place in (tmp_path / f"item{suffix}", Location(f"{bucket}/initial/item{suffix}"))
    )
    assert all((a == b).all() for one, other in zip(here, there) for a, b in zip(one, other)) and len(here) == len(
        there
    )
    with pytest.raises(VectorsError, match="no file 's3://kept/initial/other"):
        list(read_vectors(Location(f"{bucket}/initial/other{suffix}"), dim, np.dtype(np.float32)))


def test_one_run_at_a_time(bucket: str) -> None:
    """While one process renews its lease no other can train the run; afterwards any can."""
    place = Location(f"{bucket}/leased")
    first, second = Folder(place), Folder(place)
    first.lock()
    with pytest.raises(CheckpointError, match=rf"in use by another process .*process {os.getpid()} on "):
        second.lock(0.1)
    first.unlock()
    second.lock(0.1)
    second.unlock()
    assert place.entries() == [] or [entry.name for entry in place.entries()] == [""]


def test_leases_of_the_dead(bucket: str) -> None:
    """The lease of a process of this machine that is gone is free at once; another one when it no longer changes."""
    place = Location(f"{bucket}/dead")
    mine = Owner.this_process()
    gone = {**vars(mine), "token": "a", "pid": 2**22 + 1}
    assert Owner(**gone).dead() and not mine.dead()
    (place / ".lease").write(json.dumps(gone).encode())
    folder = Folder(place)
    folder.lock(0.0)
    folder.unlock()
    elsewhere = {**vars(mine), "token": "b", "machine": "another"}
    (place / ".lease").write(json.dumps(elsewhere).encode())
    folder.lock(0.0)
    folder.unlock()
    (place / ".lease").write(b"not a lease")
    folder.lock(0.0)
    folder.unlock()


def test_a_lost_lease_commits_nothing(bucket: str) -> None:
    """A process that was taken for dead, and was not, does not commit when it wakes up."""
    place = Location(f"{bucket}/woken")
    pipeline = make_pipeline(World.single(), SETTING)
    folder = Folder(place)
    folder.lock()
    writer = CheckpointWriter(pipeline, folder)
    train(pipeline, 1)
    Lease(place)._write(0)
    with pytest.raises(NotWritten, match="in use by another process that trains this run"):
        writer.save({}, {})
        writer.wait()
    assert folder.steps() == []


def test_file_urls_are_paths(tmp_path: Path) -> None:
    """file:// has renames and locks: it is the local format."""
    assert place_at(f"file://{tmp_path}/x") == tmp_path / "x" == place_at(f"{tmp_path}/x")
    assert place_at("s3://kept/x") == Location("s3://kept/x")


def test_no_bucket() -> None:
    """A bucket that is not there ends the run before its first step."""
    with pytest.raises(FileError, match="no bucket 'nowhere'"):
        Folder(Location("s3://nowhere/run")).lock()


@pytest.mark.slow
def test_a_server_that_goes_away(tmp_path: Path) -> None:
    """A checkpoint that cannot be written ends the run with one line; the next process resumes from the one before."""
    with serving() as server:
        server.bucket("lost")
        settings = [
            "checkpoint.every_steps=2",
            "train.epochs=200",
            "train.log_every=1",
            "checkpoint.path=s3://lost/run",
        ]
        command = Command(tmp_path, [*small_run(*settings), "--timeout", "10"], variables=server.variables)
        while not any(key.endswith("/COMMIT") for key in server.keys("lost", "run/")):
            assert command._process.poll() is None, command._files[1].read_text()
        server.freeze()
        ended = command.wait(90)
        line = ended.err.splitlines()[-1]  # a warning may be before it: old checkpoints were not removed either
        assert ended.code == 1 and "s3://lost/run" in line and "Traceback" not in ended.err, ended
        assert "did not answer within 5 s" in line and "earlier checkpoints are untouched" in line, ended
        server.thaw()
        more = Command(
            tmp_path,
            [
                "train",
                str(command.run),
                "--resume",
                "--run-dir",
                str(command.run),
                "--quiet",
                "--set",
                "train.steps=40",
            ],
            variables=server.variables,
        ).wait(90)
        assert more.code == 0, more
