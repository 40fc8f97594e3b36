import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from nestpipe.config.recipe import Recipe, load_recipe
from nestpipe.train.rundir import RunDirectory, RunError, default_path, remove_half_files


@dataclass(frozen=True)
class Nothing:
    size: int = 1


RECIPE = Recipe("click/ctr", "none", Nothing(), "none", Nothing(2))


def test_a_run_leaves_recipe_metrics_and_summary(tmp_path: Path) -> None:
    """Promise: the recipe as run, a line of JSON per record and a summary; nan becomes null, tensors become numbers."""
    run = RunDirectory(RECIPE, tmp_path / "deep" / "run")
    run.log({"step": 1, "loss": torch.tensor(0.5), "auc": math.nan})
    assert (run.path / "metrics.jsonl").read_text().endswith("\n")  # there before the run ends
    run.log({"step": np.int64(2), "at": [np.float32(0.25), -math.inf], "line": "a\nb"})
    run.write_summary({"loss": 1.0})
    run.write_summary({"loss": np.float64(0.5), "run": run.path})
    assert load_recipe(run.path / "recipe.toml", [], {"none": Nothing}, {"none": Nothing}) == RECIPE
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "loss": 0.5, "auc": None},
        {"step": 2, "at": [0.25, None], "line": "a\nb"},
    ]
    assert json.loads((run.path / "summary.json").read_text()) == {"loss": 0.5, "run": str(run.path)}
    assert sorted(file.name for file in run.path.iterdir()) == ["metrics.jsonl", "recipe.toml", "summary.json"]


def test_an_existing_run_is_never_touched(tmp_path: Path) -> None:
    """Promise: a second run in the same place is refused in one line; an empty directory is no run."""
    (tmp_path / "run").mkdir()
    RunDirectory(RECIPE, tmp_path / "run").log({"step": 1})
    with pytest.raises(RunError, match=r"^'.*run' already exists: choose another directory with --run, or remove it$"):
        RunDirectory(RECIPE, tmp_path / "run")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_default_places_are_named_after_the_recipe_and_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: without --run, runs of one recipe go to directories of their own, also within one second."""
    monkeypatch.chdir(tmp_path)
    paths = {RunDirectory(RECIPE).path for _ in range(3)}
    assert len(paths) == 3 and all(str(path).startswith("runs/click-ctr-2") for path in paths)
    assert default_path("x").parent == Path("runs") and not default_path("x").exists()


def test_only_rank_0_writes(tmp_path: Path) -> None:
    """Promise: other ranks leave the disk alone."""
    run = RunDirectory(RECIPE, tmp_path / "run", rank=1)
    run.log({"step": 1})
    run.write_summary({})
    assert not run.path.exists()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """Promise: an impossible directory and a full disk become one line; a summary that did not fit leaves no trace."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        with pytest.raises(RunError, match=r"--run[^\n]*$"):
            RunDirectory(RECIPE, path)
    run = RunDirectory(RECIPE, tmp_path / "run")
    for name in ("metrics.jsonl", "summary.json.tmp"):
        (run.path / name).symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"^cannot write '.*metrics.jsonl': No space left on device; choose [^\n]*$"):
        run.log({"step": 1})
    with pytest.raises(RunError, match=r"summary.json': No space left"):
        run.write_summary({"loss": 1})
    assert sorted(file.name for file in run.path.iterdir()) == ["metrics.jsonl", "recipe.toml"]


def test_half_files_go_and_whole_ones_stay(tmp_path: Path) -> None:
    """Of a worker that was killed while it wrote its last words."""
    for name in ("trace.json", "trace.json.tmp", "summary.json.tmp", "metrics.jsonl"):
        (tmp_path / name).write_text("{")
    remove_half_files(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "trace.json"]
