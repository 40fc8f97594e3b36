"""`nestpipe profile`: what bounds a recipe's step on these workers, and what to change."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from nestpipe.cli.output import check_writable, console, write_json
from nestpipe.cli.recipes import add_recipe_arguments
from nestpipe.cli.workers import add_result_argument, result_of_workers

if TYPE_CHECKING:
    from rich.table import Table

    from nestpipe.comm.world import World
    from nestpipe.config.recipe import Recipe

DESCRIPTION = """\
Measures a recipe on its own data and workers for about a minute: as it is, under `serial` and `nested`, with compute alone and
with the wire alone.  Says what bounds the step, what is hidden, what is exposed, and what to change, with figures.  Tables start
empty; nothing that it trains is kept, and it writes no run directory.
"""
EPILOG = """\
examples:
  nestpipe profile dlrm                                        a shipped recipe, by name
  nestpipe profile my.toml --workers 4 --seconds 120           longer, on a noisy machine
  nestpipe profile my.toml --schedule nested --set pipeline.micro_batches=8
  nestpipe profile timed --set tables.disk_path=/tmp --set tables.dram_rows=100000
  torchrun --nnodes 2 --nproc-per-node 8 ... -m nestpipe profile my.toml   on the cluster itself
"""
LEAST_SECONDS, MOST_SECONDS = 1.0, 86_400.0


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "profile", help="find what bounds a recipe's step, and what to change", description=DESCRIPTION, epilog=EPILOG
    )
    add_recipe_arguments(parser)
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="how long to measure; default: 60")
    parser.add_argument("--json", metavar="FILE", help="also write all figures here ('-': standard output)")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    add_result_argument(parser)
    parser.set_defaults(command=run)


def run(args: argparse.Namespace, arguments: list[str]) -> int:
    def work(recipe: Recipe, world: World) -> dict[str, Any]:
        from nestpipe.lab.profile import profile
        from nestpipe.train.display import Display

        with Display(f"profile {recipe.name}", on=world.rank == 0 and not args.quiet) as display:
            return profile(recipe, args.seconds, world, display.show)

    check_writable(args.json)
    if not LEAST_SECONDS <= args.seconds <= MOST_SECONDS:
        raise ValueError(f"--seconds must be from {LEAST_SECONDS:g} to {MOST_SECONDS:g}, not {args.seconds:g}")
    if args.steps is not None:
        raise ValueError("profile takes no --steps: it measures for --seconds")
    result = result_of_workers(args, arguments, work)
    if result is not None:
        _show(args, result)
    return 0


def _show(args: argparse.Namespace, result: dict[str, Any]) -> None:
    out = console(args.json, highlight=False, soft_wrap=True)
    out.print(_table(result))
    for note in result["notes"]:
        out.print(f"note: {note}", style="dim", markup=False)
    out.print("\nwhat the step is made of", style="bold")
    for sentence in result["outcome"]:
        out.print(f"- {sentence}", markup=False)
    out.print("\nwhat to change", style="bold")
    for number, change in enumerate(result["changes"], start=1):
        out.print(f"{number}. {change['text']}", markup=False)
    write_json(args.json, result)


def _table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    workers = f"{result['workers']} worker" + "s" * (result["workers"] > 1)
    rounds = f"{result['rounds']} round" + "s" * (result["rounds"] > 1)
    title = (
        f"{result['recipe']} on {workers}, {rounds} of {result['steps_per_turn']} steps in {result['seconds']:.0f} s; "
    )
    table = Table(title=title + "exposed ms of each step, by stage", title_justify="left", box=None, pad_edge=False)
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
