"""The arguments of every command that runs a recipe, and the recipe that they make."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nestpipe.config.recipe import Recipe

RECIPES = Path(__file__).parent.parent / "recipes"
"""The recipes that are shipped with the package."""


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    shipped = ", ".join(sorted(path.stem for path in RECIPES.glob("*.toml")))
    parser.add_argument("recipe", help=f"a TOML file, or the name of a shipped recipe: {shipped}")
    parser.add_argument("--workers", type=int, metavar="N", help="number of local worker processes (train.workers)")
    parser.add_argument("--schedule", metavar="S", help="serial, dbp, fwp or nested (pipeline.schedule)")
    parser.add_argument("--device", metavar="D", help="cpu, cuda, npu, auto or sim (train.device)")
    parser.add_argument("--steps", type=int, metavar="N", help="stop after N steps (train.steps)")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of all random numbers (train.seed)")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="seconds that a worker waits for another before it fails (train.timeout)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override any key of the recipe; repeatable; `nestpipe recipe` lists the keys",
    )
    parser.add_argument("--port", type=int, metavar="P", help="port on which local workers meet; default: a free one")


def recipe_from(args: argparse.Namespace) -> Recipe:
    """The recipe that `args.recipe` names, with `--set` and then the other flags applied."""
    flags = {
        "train.workers": args.workers,
        "pipeline.schedule": args.schedule,
        "train.device": args.device,
        "train.steps": args.steps,
        "train.seed": args.seed,
        "train.timeout": args.timeout,
    }
    return read_recipe(args.recipe, [*args.set, *(f"{k}={v}" for k, v in flags.items() if v is not None)])


def read_recipe(path: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a file, or a shipped one by name, with `section.key=value` overrides."""
    from nestpipe.config.recipe import load_recipe
    from nestpipe.data.kinds import KINDS as DATA
    from nestpipe.models.kinds import KINDS as MODELS

    return load_recipe(path, overrides, DATA, MODELS, RECIPES)
