"""Promise: a resumed run ends with the bits of an uninterrupted one, whatever may change in between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.folder import Folder
from nestpipe.comm.world import World
from nestpipe.schedule import EXACT
from nestpipe.train.rundir import RunDirectory
from nestpipe.train.trainer import train
from runs import EVERY, digest_at, disk, log_of, losses, recipe_of, resume, small, steps_in, train_run
from workers import run

KEEP_ALL = "checkpoint.keep=99"


def interrupted_twice(world: World, model: str, folder: str) -> dict[str, Any]:
    """For every schedule and tier: interrupted after step 6 of 10 and after step 9 of 13, resumed to the end.

    Resuming from an earlier step of a longer run stands in for an interruption: later batches were already being prepared.
    """
    where = Path(folder)
    untouched = train_run(world, model, small(model), str(where / "untouched"))
    found = {}
    for schedule in EXACT:
        for tier in ("dram", "disk"):
            path = str(where / f"{schedule}-{tier}")
            base = [f"pipeline.schedule={schedule}", EVERY, KEEP_ALL, "checkpoint.full_every=2"]
            settings = small(model, *base, *(disk(where) if tier == "disk" else []))
            first = train_run(world, model, [*settings, "train.steps=10"], path)
            second = resume(world, model, [*settings, "train.steps=13"], path, 6)
            last = resume(world, model, settings, path, 9)
            found[f"{schedule} {tier}"] = [
                first["steps"],
                second["steps"],
                last["steps"],
                last["digest"],
                last["metrics"],
            ]
    return {"untouched": [10, 13, untouched["steps"], untouched["digest"], untouched["metrics"]], **found}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dlrm", "hstu"])
def test_interrupted_twice_under_every_schedule(tmp_path: Path, model: str) -> None:
    """DLRM, and HSTU with dropout; 2 epochs of uneven shards, evaluations in between, incremental checkpoints: the same
    digest, held-out metrics and losses, and every step in the log once."""
    found = run(2, interrupted_twice, model, str(tmp_path), deadline=170.0)
    assert found[0] == found[1]
    expected = found[0].pop("untouched")
    assert expected[2] == 16 and len(found[0]) == 8
    for setting, left in found[0].items():
        assert left == expected, f"{model} {setting}"
    logged = losses(tmp_path / "untouched")
    for path in tmp_path.iterdir():
        if path.is_dir():
            assert losses(path) == logged, path.name
            evaluated = [line["step"] for line in log_of(path) if "eval" in line]
            assert evaluated == [5, 10, 15, 16], path.name


def stale_by_design(world: World, model: str, folder: str, tier: str) -> list[list[Any]]:
    """`semi_async` with a checkpoint every third step: untouched, and interrupted after steps 6 and 9."""
    settings = small(model, "pipeline.schedule=semi_async", EVERY, KEEP_ALL)
    settings += disk(Path(folder)) if tier == "disk" else ["tables.ttl_steps=4"] if tier == "evicting" else []
    untouched = train_run(world, model, settings, f"{folder}/untouched")
    train_run(world, model, [*settings, "train.steps=10"], f"{folder}/run")
    resume(world, model, [*settings, "train.steps=13"], f"{folder}/run", 6)
    last = resume(world, model, settings, f"{folder}/run", 9)
    without = train_run(world, model, small(model, "pipeline.schedule=semi_async"), f"{folder}/without")
    assert without["row_reads"]["one_batch_stale"] > untouched["row_reads"]["one_batch_stale"] > 0
    return [[run["digest"], run["metrics"]] for run in (untouched, last)]


@pytest.mark.parametrize(
    ("model", "tier"),
    [
        ("dlrm", "dram"),
        *(pytest.param(m, t, marks=pytest.mark.slow) for m, t in [("hstu", "disk"), ("dlrm", "evicting")]),
    ],
)
def test_semi_async_resumes_as_if_it_had_gone_on(tmp_path: Path, model: str, tier: str) -> None:
    """Promise: the batch after a checkpoint reads fresh rows whether the run went on or resumed, so both are the same bits."""
    first, last = run(2, stale_by_design, model, str(tmp_path), tier, deadline=120.0)[0]
    assert first == last


def changing_schedules(world: World, folder: str) -> list[str]:
    """Digests of a run that resumes under another schedule and tier every three steps, and of one that does not."""
    path = str(Path(folder) / "run")
    untouched = train_run(world, "dlrm", small("dlrm"), str(Path(folder) / "untouched"))
    settings = small("dlrm", EVERY)
    train_run(world, "dlrm", [*settings, "train.steps=3"], path)
    for number, schedule in enumerate(["nested", "dbp", "fwp"], start=2):
        tier = disk(Path(folder)) if number % 2 else []
        resume(world, "dlrm", [*settings, *tier, f"pipeline.schedule={schedule}", f"train.steps={3 * number}"], path)
    last = resume(world, "dlrm", settings, path)
    return [untouched["digest"], last["digest"]]


@pytest.mark.slow
def test_the_schedule_and_the_tier_may_change(tmp_path: Path) -> None:
    first, last = run(2, changing_schedules, str(tmp_path))[0]
    assert first == last


@pytest.mark.slow
def test_other_numbers_of_workers(tmp_path: Path) -> None:
    """2 -> 3 -> 1 -> 4 workers: rows, state and dense model are the same bits at every load, and the losses that follow
    are those of the unchanged run, to 1e-5."""
    settings = small("dlrm", EVERY, "checkpoint.full_every=3")
    unchanged = run(2, train_run, "dlrm", small("dlrm"), str(tmp_path / "unchanged"))[0]
    path = str(tmp_path / "run")
    left = run(2, train_run, "dlrm", [*settings, "train.steps=4"], path)[0]
    for workers, until in ((3, 8), (1, 12), (4, None)):
        at_load = run(workers, digest_at, "dlrm", settings, path)
        assert at_load == [left["digest"]] * workers, f"{workers} workers"
        steps = [] if until is None else [f"train.steps={until}"]
        left = run(workers, resume, "dlrm", [*settings, *steps], path)[0]
    assert left["steps"] == unchanged["steps"] == 16 and left["samples"] == unchanged["samples"] == 460
    expected, found = losses(tmp_path / "unchanged"), losses(path)
    assert found == pytest.approx(expected, abs=1e-5)
    assert [found[step] for step in range(1, 5)] == [expected[step] for step in range(1, 5)]


def test_retention(tmp_path: Path) -> None:
    """Keeps the last `keep` and their bases.  Every third is full (1, 4, 7, 10, 13), the others are incremental."""
    settings = small("dlrm", "checkpoint.every_steps=1", "checkpoint.keep=2", "checkpoint.full_every=3")
    run(1, train_run, "dlrm", [*settings, "train.steps=11"], str(tmp_path / "run"))
    folder = Folder(tmp_path / "run" / "checkpoints")
    assert folder.steps() == [10, 11] and folder.read(10).manifest.full
    assert [step.manifest.step for step in folder.chain(folder.read(11))] == [10, 11]
    run(1, resume, "dlrm", [*settings, "train.steps=12"], str(tmp_path / "run"))
    assert folder.steps() == [10, 11, 12]
    assert [step.manifest.step for step in folder.chain(folder.read(12))] == [10, 11, 12]
    run(1, resume, "dlrm", [*settings, "train.steps=14"], str(tmp_path / "run"))
    assert folder.steps() == [13, 14]


def named_launch(world: World, settings: list[str], run: str) -> None:
    train(recipe_of("dlrm", settings), world, run, quiet=True, launch="job")


@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_restart_resumes_only_a_run_with_checkpoints(
    tmp_path: Path, checkpoints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise another launch of the same name would overwrite the run.  A finished run is never resumed by a restart."""
    seen: list[bool] = []
    written = RunDirectory.write_summary

    def looking(self: RunDirectory, summary: Any) -> None:
        seen.append((tmp_path / "run" / "launch").exists())
        written(self, summary)

    monkeypatch.setattr(RunDirectory, "write_summary", looking)
    every = [EVERY] if checkpoints else ["train.log_every=1"]
    named_launch(World.single(), small("dlrm", *every, "train.steps=2"), str(tmp_path / "run"))
    assert seen == [checkpoints] and not (tmp_path / "run" / "launch").exists()


def test_a_finished_run_that_resumes_has_its_metrics(tmp_path: Path) -> None:
    """Nothing is trained, so nothing is evaluated; the metrics are still there, once in the log."""
    settings = small("dlrm", EVERY, "eval.every=4")
    first = train_run(World.single(), "dlrm", [*settings, "train.steps=8"], str(tmp_path / "run"))
    again = resume(World.single(), "dlrm", [*settings, "train.steps=8"], str(tmp_path / "run"))
    assert first["metrics"] and again["metrics"] == first["metrics"] and again["digest"] == first["digest"]
    assert [line["step"] for line in log_of(tmp_path / "run") if "eval" in line] == [4, 8]
    assert [line["step"] for line in log_of(tmp_path / "run") if "checkpoint" in line] == [3, 6, 8]
    with pytest.raises(CheckpointError, match=r"train\.steps is 5, but the run has already trained 8 steps"):
        resume(World.single(), "dlrm", [*settings, "train.steps=5"], str(tmp_path / "run"))


def test_float64_tables_resume(tmp_path: Path) -> None:
    """Under a dense model in float32."""
    settings = small("dlrm", EVERY, "tables.dtype=float64")
    whole = train_run(World.single(), "dlrm", [*settings, "train.steps=6"], str(tmp_path / "whole"))
    train_run(World.single(), "dlrm", [*settings, "train.steps=4"], str(tmp_path / "run"))
    assert (
        resume(World.single(), "dlrm", [*settings, "train.steps=6"], str(tmp_path / "run"))["digest"] == whole["digest"]
    )
    with pytest.raises(CheckpointError, match=r"groups of tables .*tables\.admit_after"):
        resume(World.single(), "dlrm", [*settings, "tables.admit_after=2"], str(tmp_path / "run"))


def test_resuming_earlier_without_checkpoints_leaves_one_branch(tmp_path: Path) -> None:
    """Checkpoints of the abandoned branch are removed even if the rest of the run writes none."""
    settings = small("dlrm", KEEP_ALL, "train.steps=9")
    train_run(World.single(), "dlrm", [*settings, EVERY], str(tmp_path / "run"))
    assert steps_in(tmp_path / "run") == [3, 6, 9]
    resume(World.single(), "dlrm", [*settings, "checkpoint.every_steps=none"], str(tmp_path / "run"), 6)
    assert steps_in(tmp_path / "run") == [3, 6]


def test_a_run_in_use_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process that wants to resume it changes neither its log nor its recipe nor its checkpoints."""
    settings = small("dlrm", EVERY, "train.steps=5")
    train_run(World.single(), "dlrm", settings, str(tmp_path / "run"))
    (tmp_path / "run" / "metrics.jsonl").open("a").write('{"step": 6, "loss": 0.5}\n')  # as by a run in progress
    in_use = Folder(tmp_path / "run" / "checkpoints")
    in_use.lock()
    monkeypatch.setattr(Folder.lock, "__defaults__", (0.1,))
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match="in use by another process"):
        resume(World.single(), "dlrm", [*settings, "tables.lr=0.7"], str(tmp_path / "run"))
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    in_use.unlock()


def test_a_wrong_metric_name_costs_no_checkpoint(tmp_path: Path) -> None:
    run(1, train_run, "dlrm", small("dlrm", EVERY, "checkpoint.best=acu", "train.steps=3"), str(tmp_path / "run"))
    assert steps_in(tmp_path / "run")[-1] == 3


def test_the_last_checkpoint_has_the_last_metrics(tmp_path: Path) -> None:
    """Even if a checkpoint was due at the last step, before the final evaluation."""
    settings = small("dlrm", "checkpoint.best=log_loss", "checkpoint.every_steps=2", "train.steps=4")
    run(1, train_run, "dlrm", settings, str(tmp_path / "run"))
    last = Folder(tmp_path / "run" / "checkpoints").read(4)
    assert last.manifest.metrics["log_loss"] == last.manifest.trainer["best"]


@pytest.mark.slow
def test_the_best_is_kept_and_can_be_restored(tmp_path: Path) -> None:
    """By a held-out metric, across an interruption, beside the last one.  A worse evaluation writes nothing."""
    settings = small("dlrm", "checkpoint.best=log_loss", "checkpoint.keep=1", "eval.every=2", "tables.lr=0.9")
    run(2, train_run, "dlrm", [*settings, "train.steps=7"], str(tmp_path / "run"))
    run(2, resume, "dlrm", settings, str(tmp_path / "run"))
    scores = {line["step"]: line["eval"]["log_loss"] for line in log_of(tmp_path / "run") if "eval" in line}
    best = min(scores, key=lambda step: scores[step])
    folder = Folder(tmp_path / "run" / "checkpoints")
    assert best < 14 and folder.best("log_loss")[0] == best and folder.steps()[-1] == 16
    written = [line["checkpoint"]["step"] for line in log_of(tmp_path / "run") if "checkpoint" in line]
    improved = [step for step in scores if all(scores[step] < scores[s] for s in scores if s < step)]
    assert set(written) <= {*improved, 7, 16}
    run(2, digest_at, "dlrm", settings, str(tmp_path / "run"), best)


def test_resuming_earlier_removes_what_came_later(tmp_path: Path) -> None:
    """Later checkpoints and log lines are removed, so that no run resumes from the abandoned branch."""
    settings = small("dlrm", EVERY, KEEP_ALL, "checkpoint.full_every=2")
    path = str(tmp_path / "run")
    before = run(1, train_run, "dlrm", [*settings, "train.steps=15"], path)[0]
    assert steps_in(path) == [3, 6, 9, 12, 15]
    after = run(1, resume, "dlrm", [*settings, "train.steps=7", "tables.lr=0.5"], path, 6)[0]
    assert steps_in(path) == [3, 6, 7] and after["steps"] == 7 and max(losses(path)) == 7
    again = run(1, resume, "dlrm", [*settings, "train.steps=15", "tables.lr=0.5"], path)[0]
    assert steps_in(path) == [3, 6, 7, 9, 12, 15] and again["digest"] != before["digest"]
