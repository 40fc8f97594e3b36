"""`nestpipe bench`: runs a ladder and prints it as a table."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from nestpipe.cli import PIPE_WIDTH, check_json, write_json
from nestpipe.lab.ladder import load_ladder, run_ladder
from nestpipe.train.display import Display


def bench(args: argparse.Namespace) -> int:
    check_json(args.json)
    ladder = load_ladder(args.ladder)
    rounds = args.rounds if args.rounds is not None else ladder.rounds
    if rounds < 1:
        raise ValueError(f"--rounds must be at least 1, not {rounds}")
    with Display(args.ladder) as display:
        link = None if args.link == "none" else args.link
        result = run_ladder(ladder, args.peers, rounds, display.show, link)
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(_steps(result))
    if any("stages" in rung for rung in result["rungs"]):
        console.print(_stages(result))
    for hidden in result["hidden"]:
        console.print(_told(hidden))
    write_json(args.json, result)
    return 0


def _steps(result: dict[str, Any]) -> Table:
    """Step times, and how many times faster than each rung that others are compared with: median and quartiles over rounds."""
    rungs = result["rungs"]
    link = f" on links of {result['link']}" if result["link"] else ""
    title = f"{result['title']}; {result['workers']} workers{link}, {result['rounds']} rounds"
    table = Table(title=title, title_justify="left")
    against = list(rungs[0]["ratios"])
    for column in ("rung", "ms/step", "least - most", "CPU ms", "samples/s", *(f"x {name}" for name in against)):
        table.add_column(column, justify="left" if column == "rung" else "right")
    for rung in rungs:
        spread = f"{min(rung['step_ms_all']):.1f} - {max(rung['step_ms_all']):.1f}"
        row = [f"{rung['step_ms']:.1f}", spread, f"{rung['cpu_ms']:.1f}", f"{rung['samples_per_s']:,.0f}"]
        ratios = ["{median:.2f} ({low:.2f} - {high:.2f})".format(**rung["ratios"][name]) for name in against]
        table.add_row(rung["name"], *row, *ratios)
    return table


def _told(hidden: dict[str, Any]) -> str:
    stages = " and ".join(hidden["stages"])
    return (
        f"{stages}: {hidden['exposed']!r} exposes {hidden['exposed_ms']:.1f} ms a step, {hidden['hidden']!r} "
        f"{hidden['still_exposed_ms']:.1f}: {hidden['hidden_share']:.1%} hidden. "
        f"Step times: {hidden['slower_ms']:.1f} ms more than "
        f"{hidden['without'][0]!r}, {hidden['still_slower_ms']:.1f} more than {hidden['without'][1]!r}: "
        f"{hidden['hidden_share_of_step']:.1%}"
    )


def _stages(result: dict[str, Any]) -> Table:
    """Milliseconds of each stage per step on the slower worker, and how much of it the step waited for."""
    rungs = [rung for rung in result["rungs"] if "stages" in rung]
    table = Table(title="stages: busy ms a step, and in brackets what of it was exposed", title_justify="left")
    table.add_column("rung")
    stages = [stage for stage in rungs[0]["stages"] if any(_tells(rung, stage) for rung in rungs)]
    for stage in stages:
        table.add_column(stage, justify="right")
    for rung in rungs:
        cells = [rung["stages"].get(stage, {"busy_ms": 0.0, "exposed_ms": 0.0}) for stage in stages]
        table.add_row(rung["name"], *("{busy_ms:.1f} ({exposed_ms:.1f})".format(**cell) for cell in cells))
    return table


def _tells(rung: dict[str, Any], stage: str) -> bool:
    return bool(rung["stages"].get(stage, {}).get("busy_ms", 0.0) >= 0.5)
