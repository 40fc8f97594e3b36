"""`--log tensorboard`: event files have what metrics.jsonl has, each figure once, and only where they are asked for."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from commands import nestpipe, small
from nestpipe.cli.main import main
from nestpipe.config.recipe import Recipe
from nestpipe.train.rundir import RunDirectory
from nestpipe.train.tensorboard import FOLDER, figures
from runs import log_of

loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader", reason="no tensorboard")


@dataclass(frozen=True)
class Nothing:
    size: int = 1


RECIPE = Recipe("events", "none", Nothing(), "none", Nothing(2))


def events(run: Path) -> dict[tuple[str, int], float]:
    """Every figure in the event files by name and step; none may be there twice."""
    found: dict[tuple[str, int], float] = {}
    for path in sorted((run / FOLDER).iterdir()):
        for event in loader.EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                assert (value.tag, event.step) not in found, (value.tag, event.step)
                found[value.tag, event.step] = value.tensor.float_val[0]
    return found


def logged(run: Path) -> dict[tuple[str, int], float]:
    return {(name, line["step"]): value for line in log_of(run) for name, value in figures(line)}


def test_names_of_figures() -> None:
    """Numbers of a line itself are the training's; others are named by where they stand; text, null and flags are left out."""
    line: dict[str, Any] = {"step": 5, "loss": 0.5, "auc": None, "why": "so", "eval": {"auc": 0.75, "samples": 9}}
    line |= {"exposed": {"embed": 1.5}, "memory": {"tables": {"item": 3}}, "checkpoint": {"full": True, "bytes": 7}}
    assert dict(figures(line)) == {
        "train/loss": 0.5, "eval/auc": 0.75, "eval/samples": 9, "exposed/embed": 1.5, "memory/tables/item": 3,
        "checkpoint/bytes": 7,
    }  # fmt: skip


def test_events_are_the_log(tmp_path: Path) -> None:
    """Each line is on disk when it was logged; a resumed run takes back the steps after its checkpoint, and goes on."""
    run = RunDirectory(RECIPE, tmp_path / "run", tensorboard=True)
    for step in range(1, 6):
        run.log({"step": step, "loss": 1.0 / step, "auc": float("nan"), "eval": {"auc": 0.5}})
        assert events(run.path) == pytest.approx(logged(run.path)) and len(events(run.path)) == 2 * step
    again = RunDirectory(RECIPE, tmp_path / "run", resuming=True, tensorboard=True)
    again.rewind_to(3)
    again.log({"step": 4, "loss": 9.0})
    again.write_summary({})
    found = events(run.path)
    assert found == pytest.approx(logged(run.path)) and found["train/loss", 4] == 9.0 and ("train/loss", 5) not in found


def test_only_rank_0_writes_and_only_when_asked(tmp_path: Path) -> None:
    """No folder for other ranks, nor for a run without `--log`."""
    RunDirectory(RECIPE, tmp_path / "one", rank=1, tensorboard=True).log({"step": 1, "loss": 1.0})
    RunDirectory(RECIPE, tmp_path / "two").log({"step": 1, "loss": 1.0})
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["metrics.jsonl", "recipe.toml", "two"]


def test_without_the_package_nothing_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that says what to install, before a run directory is made."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    arguments = [*small(workers=2), "--run", str(tmp_path / "run"), "--log", "tensorboard"]
    assert main(arguments) == 2 and not (tmp_path / "run").exists()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "needs the package tensorboard: pip install" in said


@pytest.mark.slow
def test_a_run_and_its_resumption(tmp_path: Path) -> None:
    """Two workers, resumed from an earlier step without the flag: the events are still those of the log, each once."""
    settings = ["train.log_every=2", "eval.every=4", "checkpoint.every_steps=3", "checkpoint.keep=9", "train.steps=8"]
    first = nestpipe(tmp_path, *small(*settings, workers=2), "--log", "tensorboard", run="run")
    assert first.code == 0, first.err
    run = tmp_path / "run"
    assert events(run) == pytest.approx(logged(run)) and {"train/loss", "eval/auc"} <= {name for name, _ in events(run)}
    again = nestpipe(tmp_path, "train", str(run), "--resume", "--from", "3", "--steps", "10", "--quiet", run="run")
    assert again.code == 0, again.err
    assert events(run) == pytest.approx(logged(run)) and ("train/loss", 10) in events(run)
