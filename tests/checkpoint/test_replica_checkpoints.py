"""Checkpoints of replica groups: one copy of the tables, for any number of workers and groups; replicas are compared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nestpipe.checkpoint import load
from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.manifest import parse
from nestpipe.checkpoint.replicas import ReplicasDiffer
from nestpipe.comm.world import World
from nestpipe.pipeline import TrainPipeline
from nestpipe.tables.row_digest import add_digests, row_digest
from nestpipe.tables.snapshot import Rows
from nestpipe.train import trainer
from runs import EVERY, digest_at, resume, small, train_run
from workers import run

SLOW = pytest.mark.slow
EVICTING = ["tables.admit_after=2", "tables.ttl_steps=4", "tables.max_rows=40", "tables.sweep_every=3"]


def settings_of(size: int | None, *more: str) -> list[str]:
    every = [EVERY, "checkpoint.keep=20", "checkpoint.full_every=3"]
    return small("dlrm", *every, "train.streams=4", "train.epochs=none", f"pipeline.group_size={size or 'none'}", *more)


def manifest_of(folder: Path, step: int) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / f"checkpoints/step-{step:08d}/manifest.json").read_text())
    return found


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ((2, 1), [(1, None), (2, None)]),
        pytest.param((4, 2), [(1, None), (2, 1), (3, None), (3, 1), (4, 4), (4, 1)], marks=SLOW),
        pytest.param((3, None), [(4, 2), (2, 1)], marks=SLOW),
        pytest.param((4, 1), [(4, 2)], marks=SLOW),
    ],
)
def test_any_groups_load_what_any_groups_wrote(
    tmp_path: Path, written: tuple[int, int | None], read: list[tuple[int, int | None]]
) -> None:
    """Promise: one copy of the tables is written, full and incremental, with evicted keys, and any (W, I) restores its bits."""
    workers, size = written
    settings = settings_of(size, "train.steps=9", *EVICTING)
    summary = run(workers, train_run, "dlrm", settings, str(tmp_path / "run"))[0]
    manifest = manifest_of(tmp_path / "run", 9)
    files = manifest["files"]
    assert isinstance(files, list)
    assert {f["worker"] for f in files if f["kind"] in ("rows", "removed")} <= set(range(size or workers))
    assert sorted(f["worker"] for f in files if f["kind"] == "worker") == list(range(workers))
    assert manifest.get("shards") == (size if size and size < workers else None)
    for count, group in read:
        found = run(count, digest_at, "dlrm", settings_of(group, *EVICTING), str(tmp_path / "run"))
        assert found == [summary["digest"]] * count, (count, group)


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=SLOW)])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, size: int) -> None:
    """Promise: with groups too, a run that went on from a checkpoint, under another schedule, has the digest of one that did not
    stop, and evicts, counted once, what as many workers as a group has evict."""
    settings = settings_of(size, "train.steps=12", *EVICTING)
    workers = 2 * size
    whole = run(workers, train_run, "dlrm", settings, str(tmp_path / "run"))[0]
    flat = run(size, train_run, "dlrm", settings_of(None, "train.steps=12", *EVICTING), str(tmp_path / "flat"))[0]
    again = run(workers, resume, "dlrm", [*settings, "pipeline.schedule=nested"], str(tmp_path / "run"), 6)[0]
    assert again["digest"] == whole["digest"] and again["evicted"] == whole["evicted"] == flat["evicted"]
    assert sum(whole["evicted"].values()) > 0


def with_a_spoilt_replica(world: World, settings: list[str], folder: str, step: int) -> str:
    """One row of the last worker is changed by one bit after a step."""
    real = trainer.Trainer.save_if_due

    def save(self: trainer.Trainer, progress: object) -> None:
        pipeline: TrainPipeline = self.pipeline
        if pipeline.next_batch == step and world.rank == world.size - 1:
            pipeline.settle()
            store = pipeline.stores[0]
            keys, slots = store.rows_of(0)
            values, state = store.read(slots[:1])
            values.view(np.int32)[0, 0] ^= 1
            store.writeback(np.zeros(1, np.uint16), keys[:1], values, state)
        real(self, progress)  # type: ignore[arg-type]

    trainer.Trainer.save_if_due = save  # type: ignore[method-assign, assignment]
    try:
        train_run(world, "dlrm", settings, folder)
    except ReplicasDiffer as error:
        return str(error)
    finally:
        trainer.Trainer.save_if_due = real  # type: ignore[method-assign]
    return "no difference"


def test_a_checkpoint_of_replicas_that_differ_is_not_written(tmp_path: Path) -> None:
    """Promise: one bit in one row of one replica fails the next checkpoint on all workers with a line that names the tables, the
    shard and the ranks; the checkpoint before it stays the last."""
    settings = settings_of(1, "train.steps=12")
    found = run(2, with_a_spoilt_replica, settings, str(tmp_path / "run"), 6)
    assert len(set(found)) == 1 and "replicas differ after step 6: ranks 0 and 1" in found[0], found
    assert "own shard 0 of 1, hold different rows of tables" in found[0], found
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("*step-*"))
    assert kept == ["step-00000003"], kept


def with_a_spoilt_reader(world: World, settings: list[str], folder: str) -> str:
    real = load.read_rows

    def read_rows(checkpoint: object, file: object) -> Rows:
        rows = real(checkpoint, file)  # type: ignore[arg-type]
        if world.rank == world.size - 1 and rows.values.size:
            rows.values.view(np.int32)[0, 0] ^= 1
        return rows

    load.read_rows = read_rows
    try:
        return digest_at(world, "dlrm", settings, folder)
    except ReplicasDiffer as error:
        return str(error)
    finally:
        load.read_rows = real


def test_a_replica_that_comes_back_is_compared(tmp_path: Path) -> None:
    """Promise: a worker that has read other rows than its replicas is found before the run goes on."""
    settings = settings_of(1, "train.steps=3")
    run(2, train_run, "dlrm", settings, str(tmp_path / "run"))
    found = run(2, with_a_spoilt_reader, settings, str(tmp_path / "run"))
    assert len(set(found)) == 1 and "replicas differ after step 3 was read: ranks 0 and 1" in found[0], found


def test_shards_of_a_manifest_are_checked(tmp_path: Path) -> None:
    """Promise: a manifest whose shards do not divide its workers, or whose rows are of a worker that has none, is refused."""
    run(2, train_run, "dlrm", settings_of(1, "train.steps=3"), str(tmp_path / "run"))
    good = manifest_of(tmp_path / "run", 3)
    path = tmp_path / "manifest.json"
    assert parse(json.dumps(good).encode(), path).owners == 1
    for shards, why in [(3, "shards must divide"), (0, "shards must divide"), ("1", "shards must be an integer")]:
        with pytest.raises(CheckpointError, match=why):
            parse(json.dumps({**good, "shards": shards}).encode(), path)
    files = [{**file, "worker": 1} if file["kind"] == "rows" else file for file in good["files"]]  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match="is from worker 1 of 1"):
        parse(json.dumps({**good, "files": files}).encode(), path)


def test_the_digest_of_rows() -> None:
    """Promise: neither order nor division matters; any bit of a row, a key or a table does."""
    rng = np.random.default_rng(1)
    rows = Rows(
        rng.integers(0, 3, 50).astype(np.uint16),
        rng.integers(-9, 9, 50),
        rng.random((50, 4), np.float32),
        rng.random((50, 2), np.float32),
    )

    def of(order: np.ndarray) -> Rows:
        return Rows(rows.tables[order], rows.keys[order], rows.values[order], rows.state[order])

    whole = row_digest(rows)
    order = rng.permutation(50)
    assert row_digest(of(order)) == whole == add_digests(row_digest(of(order[:20])), row_digest(of(order[20:])))
    for array in (rows.tables, rows.keys, rows.values, rows.state):
        bits = array.reshape(-1).view(np.uint8)
        for place in rng.integers(0, len(bits), 20):
            bits[place] ^= 1
            assert row_digest(rows) != whole
            bits[place] ^= 1
    assert row_digest(rows) == whole
