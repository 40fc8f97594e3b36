"""What a run leaves behind, and that the same run leaves the same bits whoever starts it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from commands import MODULE, TORCHRUN, Command, nestpipe, small
from nestpipe.comm.world import World
from nestpipe.config.recipe import load_recipe
from nestpipe.data import kinds as data_kinds
from nestpipe.models import kinds as model_kinds
from nestpipe.train.trainer import train
from workers import run

# Lines that begin at bytes 0, 41 and 138 of 307.  Of the nine tenths for training worker 0 has two, worker 1 one, worker 2 none.
FEW_LINES = ["\t".join(["0", *[""] * 13, *["0123abcd"] * ids, *[""] * (26 - ids)]) for ids in (0, 7, 16)]


def rerun(folder: Path, left: Path, **options: Any) -> dict[str, Any]:
    """The summary of a run of the recipe that another run left."""
    return nestpipe(folder, "train", str(left / "recipe.toml"), "--json", "-", **options).summary()


@pytest.mark.slow
def test_a_run_leaves_recipe_metrics_summary_and_trace(tmp_path: Path) -> None:
    """One worker: files and page, JSON alone on standard output; `python -m nestpipe recipe.toml` gives the same digest."""
    command = Command(tmp_path, [*small("train.log_every=4", "pipeline.micro_batches=4"), "--json", "-"])
    summary = command.wait().summary()
    files = ["metrics.jsonl", "recipe.toml", "report.html", "summary.json", "trace.json"]
    assert sorted(path.name for path in command.run.iterdir()) == files
    assert json.loads((command.run / "summary.json").read_text()) == summary
    recipe = tomllib.loads((command.run / "recipe.toml").read_text())
    assert recipe["data"]["samples"] == 2000 and recipe["pipeline"]["micro_batches"] == 4
    lines = [json.loads(line) for line in (command.run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 8, 12, 16, 20, 20]
    assert all({"loss", "samples", "seconds", "samples_per_s", "memory"} <= line.keys() for line in lines[:-1])
    memory = lines[0]["memory"]
    assert 0 < memory["table_bytes"] < memory["resident_bytes"] and memory["rows"] > 0 and memory["buffer_bytes"] > 0
    assert lines[-1]["eval"] == summary["metrics"]

    expected = {"recipe": "dlrm", "workers": 1, "micro_batches": 4, "steps": 20, "samples": 2000}
    assert expected.items() <= summary.items() and summary["schedule"] == recipe["pipeline"]["schedule"]
    assert summary["samples_per_s"] > 0 and 0.3 < summary["loss"] < 1.5
    assert 0 < summary["metrics"]["auc"] < summary["metrics"]["bayes_auc"] < 1
    assert len(bytes.fromhex(summary["digest"])) == 32

    again = rerun(tmp_path, command.run, cold=MODULE)
    assert again["digest"] == summary["digest"] and again["metrics"] == summary["metrics"]
    assert again["loss"] == summary["loss"]


def train_here(world: World, recipe: str, run: str) -> dict[str, Any]:
    """The summary of a recipe that is trained by workers which are there already."""
    return train(load_recipe(recipe, [], data_kinds.KINDS, model_kinds.KINDS), world, run, quiet=True)


@pytest.mark.slow
def test_two_workers_leave_the_same_bits_under_torchrun(tmp_path: Path) -> None:
    """torchrun with two processes, and two workers without any command line: one digest, bit for bit."""
    settings = ["train.log_every=4", "pipeline.micro_batches=4"]
    # torchrun takes --run for its own --run-path, whatever stands before it
    arguments = [*small(*settings), "--run-dir", str(tmp_path / "joined"), "--json", str(tmp_path / "two.json")]
    joined = Command(tmp_path, arguments, run="joined", cold=[*TORCHRUN, "2", "-m", "nestpipe"])
    ended = joined.wait(litter=True)
    assert ended.code == 0 and ended.out == "", ended.err
    summary = json.loads((tmp_path / "two.json").read_text())
    assert json.loads((joined.run / "summary.json").read_text()) == summary
    assert {"workers": 2, "steps": 10, "samples": 2000}.items() <= summary.items()
    again = run(2, train_here, str(joined.run / "recipe.toml"), str(tmp_path / "again"))
    assert [part["digest"] for part in again] == [summary["digest"]] * 2
    assert again[0]["metrics"] == summary["metrics"]


@pytest.mark.slow
def test_three_workers_of_which_one_has_no_data_leave_the_same_bits(tmp_path: Path) -> None:
    """Three lines on three workers in batches of one: the worker without a line joins in, and a second run is equal."""
    (tmp_path / "train.txt").write_text("\n".join(FEW_LINES) + "\n")
    settings = ["train.batch_size=1", "model.bottom=[4]", "model.top=[4]", "model.dim=4"]
    settings.append(f"data.paths=['{tmp_path}/train.txt']")
    sets = [part for setting in settings for part in ("--set", setting)]
    command = Command(tmp_path, ["train", "criteo", *sets, "--workers", "3", "--json", "-"])
    summary = command.wait().summary()
    assert {"workers": 3, "steps": 2, "samples": 3}.items() <= summary.items()
    # Again, without the command line: what worker 0 was asked and what it left is all that counts.
    again = run(3, train_here, str(command.run / "recipe.toml"), str(tmp_path / "again"))
    assert [part["digest"] for part in again] == [summary["digest"]] * 3
    assert again[0]["loss"] == summary["loss"] and again[0]["samples"] == 3
