"""Runs a command's work on its workers and brings worker 0's result back."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nestpipe.comm.world import World
    from nestpipe.config.recipe import Recipe

Work = Callable[["Recipe", "World"], dict[str, Any]]


def is_worker() -> bool:
    """Whether a launcher (ours or torchrun) started this process."""
    return "RANK" in os.environ


def add_result_argument(parser: argparse.ArgumentParser) -> None:
    """Where worker 0 leaves its result for the launcher.  Not for users."""
    parser.add_argument("--result", help=argparse.SUPPRESS)


def result_of_workers(args: argparse.Namespace, arguments: list[str], work: Work) -> dict[str, Any] | None:
    """What `work` returns on worker 0.  None in a process that has nothing to show: another worker, or one that we launched."""
    from nestpipe.cli.recipes import recipe_from

    if is_worker():
        from nestpipe.launch.signals import end_on_signals

        end_on_signals()
        result = _work_here(args, work)
        if args.result is None or result is None:
            return result
        Path(args.result).write_text(json.dumps(result))
        return None
    workers = recipe_from(args).train.workers
    if workers == 1:
        return _work_here(args, work)
    from nestpipe.launch.launcher import launch

    with tempfile.TemporaryDirectory(prefix="nestpipe-result-") as folder:
        place = Path(folder) / "result.json"
        launch([*arguments, "--result", str(place)], workers, args.port)
        found = json.loads(place.read_text())
    assert isinstance(found, dict)
    return found


def _work_here(args: argparse.Namespace, work: Work) -> dict[str, Any] | None:
    from nestpipe.cli.recipes import recipe_from
    from nestpipe.launch.join import join

    recipe = recipe_from(args)
    world = join(recipe.train.timeout)
    result = work(recipe, world)
    world.leave()
    return result if world.rank == 0 else None
