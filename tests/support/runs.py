"""Small runs, with and without checkpoints, on workers that are there already; what tests of checkpoints train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nestpipe.checkpoint.folder import Folder
from nestpipe.cli.main import RECIPES
from nestpipe.comm.world import World
from nestpipe.config.recipe import Recipe, load_recipe, parse_recipe
from nestpipe.data.kinds import KINDS as DATA
from nestpipe.models.kinds import KINDS as MODELS
from nestpipe.train.build import make_pipeline, open_source
from nestpipe.train.checkpoints import find_resumed, go_on
from nestpipe.train.digest import digest
from nestpipe.train.trainer import train

SIZES = {
    # 2 workers: 115 and 115 samples an epoch, 8 steps of which the last is short; 16 steps in all
    "dlrm": ["data.samples=230", "data.features=3", "data.hot=[1,1,2]", "data.ids=150", "data.eval_samples=64",
             "model.dim=8", "model.bottom=[8]", "model.top=[8]"],
    "hstu": ["data.users=231", "data.items=150", "data.max_length=10", "data.mean_length=6.0", "data.negatives=4",
             "model.dim=8", "model.max_length=10", "model.dropout=0.3", "eval.max_samples=40", "eval.top_k=[10]"],
}  # fmt: skip
COMMON = ["train.batch_size=16", "train.epochs=2", "train.log_every=1", "eval.every=5", "eval.batch_size=64",
          "pipeline.micro_batches=2"]  # fmt: skip
EVERY = "checkpoint.every_steps=3"


def small(model: str, *settings: str) -> list[str]:
    return [*SIZES[model], *COMMON, *settings]


def disk(folder: Path) -> list[str]:
    return [f"tables.disk_path='{folder}'", "tables.dram_rows=30"]


def recipe_of(model: str, settings: list[str]) -> Recipe:
    return load_recipe(model, settings, DATA, MODELS, RECIPES)


def train_run(
    world: World, model: str, settings: list[str], run: str, from_step: int | None = None, goes_on: bool = False
) -> dict[str, Any]:
    """The summary of a run, or of its going on from a step (None: the last that is there)."""
    recipe = recipe_of(model, settings)
    resumed = (
        find_resumed(recipe, Path(run), from_step, lambda text: parse_recipe(text, DATA, MODELS)) if goes_on else None
    )
    assert resumed is not None or not goes_on
    return train(recipe, world, run, quiet=True, resumed=resumed, resuming=goes_on)


def resume(world: World, model: str, settings: list[str], run: str, from_step: int | None = None) -> dict[str, Any]:
    return train_run(world, model, settings, run, from_step, goes_on=True)


def digest_at(world: World, model: str, settings: list[str], run: str, step: int | None = None) -> str:
    """What is in the tables and the dense model when a checkpoint is loaded, before anything is trained."""
    recipe = recipe_of(model, settings)
    resumed = find_resumed(recipe, Path(run), step, lambda text: parse_recipe(text, DATA, MODELS))
    assert resumed is not None
    pipeline = make_pipeline(recipe, open_source(recipe, "train", world), world)
    go_on(pipeline, resumed, lambda done: None)
    found = digest(pipeline)
    pipeline.close()
    return found


def log_of(run: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]


def losses(run: str | Path) -> dict[int, float]:
    """By step; every step is there once."""
    found = [(line["step"], line["loss"]) for line in log_of(run) if "loss" in line]
    assert [step for step, _ in found] == list(range(1, len(found) + 1)), found
    return dict(found)


def steps_in(run: str | Path) -> list[int]:
    return Folder(Path(run) / "checkpoints").steps()
