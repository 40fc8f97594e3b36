"""`nestpipe schedule S --recipe R --check` proves the list that R runs, not a default one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nestpipe import schedule
from nestpipe.cli.main import main
from nestpipe.comm.world import World
from nestpipe.config.recipe import load_recipe
from nestpipe.data.kinds import KINDS as DATA
from nestpipe.models.kinds import KINDS as MODELS
from nestpipe.schedule import Action, Options
from nestpipe.train.build import make_pipeline, open_source, recipe_options

RECIPE = """
[data]
kind = "clicks"
features = 3
ids = 100
samples = 64
eval_samples = 0

[model]
kind = "dlrm"
dim = 4
bottom = [8]
top = [8]

[tables]
disk_path = "{disk}"
dram_rows = 10
ttl_steps = 5
sweep_every = 2

[pipeline]
schedule = "nested"
micro_batches = 3
look_ahead = 1

[train]
clip_norm = 1.0
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Disk tier, eviction and clipping at once."""
    path = tmp_path / "my.toml"
    path.write_text(RECIPE.format(disk=tmp_path))
    return path


def checked(recipe: Path, tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    found = tmp_path / "found.json"
    code = main(["schedule", "nested", "--recipe", str(recipe), "--check", "--json", str(found), *flags])
    return code, json.loads(found.read_text())


def test_the_recipes_own_list_is_proven(recipe: Path, tmp_path: Path) -> None:
    """Promise: micro-batches, look-ahead, clipping, eviction and disk are the recipe's, and the list is exact."""
    code, found = checked(recipe, tmp_path)
    assert code == 0 and found["check"]["exact"] and found["micro_batches"] == 3
    update = next(a for a in found["actions"] if (a["stage"], a["batch"]) == ("update", 2))
    assert update["waits"] == ["agree 2"], "clipping: no row is updated before all workers agree"
    retrieve = next(a for a in found["actions"] if (a["stage"], a["batch"]) == ("retrieve", 3))
    assert "writeback 1" in retrieve["waits"], "eviction: a sweep sees what writeback wrote"
    _, found = checked(recipe, tmp_path, "--set", "tables.ttl_steps=none")
    retrieve = next(a for a in found["actions"] if (a["stage"], a["batch"]) == ("retrieve", 3))
    assert "writeback 1" not in retrieve["waits"], "a disk without eviction: retrieve does not wait for writeback"


def test_options_are_those_of_the_pipeline(recipe: Path) -> None:
    """Promise: what is proven is what the pipeline of that recipe runs with, whatever the recipe sets."""
    cases = [
        [],
        ["tables.ttl_steps=none"],
        ["train.clip_norm=none", "pipeline.early_update=false"],
        ["model.top=[600, 600]"],
    ]
    for overrides in cases:
        made = load_recipe(recipe, overrides, DATA, MODELS)
        pipeline = make_pipeline(made, open_source(made, "train", World.single()), World.single())
        pipeline.close()
        assert recipe_options(made) == pipeline.options


def test_a_missing_wait_is_named(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: with one wait patched away from the engine's list, the check fails and names the two actions."""
    builder = schedule.BUILDERS["nested"]

    def mutated(step: int, micro_batches: int, start: int, options: Options) -> list[Action]:
        return [
            replace(a, waits=tuple(w for w in a.waits if w[0] != "writeback")) if a.name == ("retrieve", 3, -1) else a
            for a in builder(step, micro_batches, start, options)
        ]

    monkeypatch.setitem(schedule.BUILDERS, "nested", mutated)
    code, found = checked(recipe, tmp_path)
    assert code == 1 and not found["check"]["exact"]
    assert "writeback 1" in found["check"]["why"] and "retrieve 3" in found["check"]["why"]


def test_auto_needs_a_number(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["schedule", "nested", "--recipe", str(recipe), "--set", "pipeline.micro_batches=auto"]
    assert main(arguments) == 2
    assert "--micro N" in capsys.readouterr().err
    assert main([*arguments, "--micro", "2", "--check"]) == 0
