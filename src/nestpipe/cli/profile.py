"""`nestpipe profile`: what bounds a recipe's step on these workers, and what to change."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

DESCRIPTION = """\
Measures a recipe on its own data and workers for about a minute: as it stands, under `serial` and `nested`, with compute alone
and with the wire alone.  Says what bounds the step, what is hidden, what is exposed, and what to change, with the figures.
Trains nothing that is kept and writes nothing; tables begin empty.

  nestpipe profile dlrm                                        a shipped recipe, by name
  nestpipe profile my.toml --workers 4 --seconds 120           longer, where the machine is noisy
  nestpipe profile my.toml --schedule nested --set pipeline.micro_batches=8
  nestpipe profile timed --set tables.disk_path=/tmp --set tables.dram_rows=100000
  torchrun --nnodes 2 --nproc-per-node 8 ... -m nestpipe profile my.toml   on the cluster itself
"""
LEAST_SECONDS, MOST_SECONDS = 1.0, 86_400.0


def add_parser(commands: Any, recipe_flags: Callable[[argparse.ArgumentParser], None]) -> None:
    parser = commands.add_parser(
        "profile",
        help="say what bounds a recipe's step, and what to change",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    recipe_flags(parser)
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="how long to measure; default 60")
    parser.add_argument("--json", metavar="FILE", help="write all figures here too ('-': standard output)")
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    parser.add_argument("--result", help=argparse.SUPPRESS)  # where a launched worker leaves the result for its parent
    parser.set_defaults(command=run)


def run(args: argparse.Namespace, arguments: list[str]) -> int:
    from nestpipe.cli.main import check_json, load

    if "RANK" in os.environ:
        from nestpipe.launch.signals import end_on_signals

        end_on_signals()
    check_json(args.json)
    if not LEAST_SECONDS <= args.seconds <= MOST_SECONDS:
        raise ValueError(f"--seconds must be from {LEAST_SECONDS:g} to {MOST_SECONDS:g}, not {args.seconds:g}")
    if args.steps is not None:
        raise ValueError("--steps is not for profile, which measures for --seconds")
    if "RANK" in os.environ:
        result = _profile_here(args)
        if result is not None and args.result:
            Path(args.result).write_text(json.dumps(result))
            return 0
        return _tell(args, result) if result is not None else 0
    workers = load(args).train.workers
    if workers == 1:
        result = _profile_here(args)
    else:
        from nestpipe.launch.launcher import launch

        with tempfile.TemporaryDirectory(prefix="nestpipe-profile-") as folder:
            place = Path(folder) / "result.json"
            launch([*arguments, "--result", str(place)], workers, args.port)
            result = json.loads(place.read_text())
    assert result is not None
    return _tell(args, result)


def _profile_here(args: argparse.Namespace) -> dict[str, Any] | None:
    """On worker 0 the result, elsewhere None."""
    from nestpipe.cli.main import load
    from nestpipe.lab.profile import profile
    from nestpipe.launch.launcher import join
    from nestpipe.train.display import Display

    recipe = load(args)
    world = join(recipe.train.timeout)
    with Display(f"profile {recipe.name}", on=world.rank == 0 and not args.quiet) as display:
        result = profile(recipe, args.seconds, world, display.show)
    world.leave()
    return result if world.rank == 0 else None


def _tell(args: argparse.Namespace, result: dict[str, Any]) -> int:
    from nestpipe.cli.main import PIPE_WIDTH, write_json

    console = Console(
        width=None if sys.stdout.isatty() else PIPE_WIDTH, stderr=args.json == "-", highlight=False, soft_wrap=True
    )
    console.print(_table(result))
    for note in result["notes"]:
        console.print(f"note: {note}", style="dim", markup=False)
    console.print("\nwhat the step is made of", style="bold")
    for sentence in result["outcome"]:
        console.print(f"- {sentence}", markup=False)
    console.print("\nwhat to change", style="bold")
    for number, change in enumerate(result["changes"], start=1):
        console.print(f"{number}. {change['text']}", markup=False)
    write_json(args.json, result)
    return 0


def _table(result: dict[str, Any]) -> Table:
    workers = f"{result['workers']} worker" + "s" * (result["workers"] > 1)
    rounds = f"{result['rounds']} round" + "s" * (result["rounds"] > 1)
    title = (
        f"{result['recipe']} on {workers}, {rounds} of {result['steps_per_turn']} steps in {result['seconds']:.0f} s; "
    )
    table = Table(title=title + "of each step the exposed ms", title_justify="left", box=None, pad_edge=False)
    groups = list(result["variants"][0]["exposed_ms"])
    for column in ("variant", "ms/step", "spread", "samples/s", *groups):
        table.add_column(column, justify="left" if column == "variant" else "right")
    for v in result["variants"]:
        low, high = v["spread_ms"]
        table.add_row(
            v["name"] + (" (the recipe)" if v["own"] else ""),
            f"{v['step_ms']:.1f}",
            f"{low:.1f} - {high:.1f}",
            "" if v["only"] else f"{v['samples_per_s']:,.0f}",
            *(f"{v['exposed_ms'][group]:.1f}" for group in groups),
            style="dim" if v["only"] else None,
        )
    return table
