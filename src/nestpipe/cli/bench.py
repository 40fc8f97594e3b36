"""`nestpipe bench`: runs a ladder and prints it as a table."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nestpipe.cli.main import PIPE_WIDTH, check_json, write_json
from nestpipe.lab.ladder import MIX_POINTS, load_ladder
from nestpipe.lab.running import run_ladder
from nestpipe.train.display import Display

CLUSTERING = "clustering"
"""Not a ladder, but measured by the same command."""


def bench(args: argparse.Namespace, arguments: list[str]) -> int:
    check_json(args.json)
    check_json(args.page, "--page")
    made = {"date": datetime.now().strftime("%Y-%m-%d %H:%M"), "command": shlex.join(["nestpipe", *arguments])}
    if args.ladder == CLUSTERING:
        return _bench_clustering(args, made)
    if args.data is not None:
        raise ValueError(f"--data is for `nestpipe bench {CLUSTERING}`; a ladder makes its own data")
    ladder = load_ladder(args.ladder).only(args.rungs)
    if args.workers is not None:
        ladder = replace(ladder, workers=args.workers)
    if ladder.workers < 1:
        raise ValueError(f"--workers must be at least 1, not {ladder.workers}")
    rounds = args.rounds if args.rounds is not None else ladder.rounds
    if rounds < 1:
        raise ValueError(f"--rounds must be at least 1, not {rounds}")
    peers = args.peers or sorted({rung.peer for rung in ladder.rungs if rung.peer is not None and args.rungs})
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # hosts and rungs are cleared away as after Ctrl-C
    with Display(args.ladder) as display:
        link = ladder.link if args.link is None else None if args.link == "none" else args.link
        disk = ladder.disk if args.disk is None else None if args.disk == "none" else args.disk
        result = run_ladder(ladder, peers, rounds, display.show, link, disk)
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(_steps(result))
    if any("stages" in rung for rung in result["rungs"]):
        console.print(_stages(result))
    for hidden in result["hidden"]:
        console.print(_told(hidden))
    mix = result.get("mix")
    if mix is not None:
        console.print(_told_mix(mix))
    best = result.get("best")
    if best is not None:
        console.print(_told_best(best, result["rungs"]))
    _write(args, result | made)
    return 0 if all(checked["holds"] for checked in (mix, best) if checked is not None) else 1


def _told_best(best: dict[str, Any], rungs: list[dict[str, Any]]) -> str:
    chosen = next(rung for rung in rungs if rung["name"] == best["rung"])["micro_batches_chosen"]
    outcome = "within" if best["holds"] else "NOT within"
    return (
        f"{best['rung']!r} chose {chosen[-1][1]} micro-batches from batch {chosen[-1][0]} on and takes "
        f"{_median(best['ratio'])} of the step of {best['fastest']!r}, the fastest given: {outcome} {best['within']:g}"
    )


def _told_mix(mix: dict[str, Any]) -> str:
    words = {"lookup": "lookup", "all2all": "All2All", "compute": "compute and the rest"}
    shares = ", ".join(f"{words[p]} {share:.1f} % (wanted {mix['wanted'][p]:g})" for p, share in mix["found"].items())
    reached = ", ".join(
        f"{name!r} reaches {spread['median']:.2f}x, {spread['median'] / mix['ideal']:.0%} of it"
        for name, spread in mix["reached"].items()
    )
    outcome = "within" if mix["holds"] else "NOT within"
    return (
        f"step of {mix['wanted']['rung']!r}: {shares}: {outcome} {MIX_POINTS:g} points.  With nothing but that compute left, "
        f"it would be {mix['ideal']:.2f}x as fast: the ideal.  {reached}"
    )


def _write(args: argparse.Namespace, result: dict[str, Any]) -> None:
    from nestpipe.cli.report import write
    from nestpipe.report.bench import shape_bench

    write_json(args.json, result)
    if args.page:
        write(Path(args.page), shape_bench(result, args.page), told=sys.stderr)


def _bench_clustering(args: argparse.Namespace, made: dict[str, str]) -> int:
    from nestpipe.lab.clustering_bench import measure

    for flag, given in (
        ("--peers", args.peers),
        ("--rung", args.rungs),
        ("--rounds", args.rounds),
        ("--workers", args.workers),
        ("--link", args.link),
        ("--disk", args.disk),
    ):
        if given:
            raise ValueError(f"{flag} is for ladders; `nestpipe bench {CLUSTERING}` counts rows on one worker")
    with Display(CLUSTERING) as display:
        rows = measure(args.data, display.show)
    title = (
        "rows sent per batch and worker, by how samples are divided into micro-batches (dedup per micro-batch), and CPU"
    )
    table = Table(title=title, title_justify="left")
    for column in ("data", "N", "random", "clustered", "fewer", "window dedup", "fewer", "CPU ms"):
        table.add_column(column, justify="left" if column == "data" else "right")
    for row in rows:
        table.add_row(
            row["data"],
            str(row["micro_batches"]),
            f"{row['random']:,.0f}",
            f"{row['clustered']:,.0f}",
            f"{row['fewer']:.1%}",
            f"{row['window']:,.0f}",
            f"{row['fewer_at_most']:.1%}",
            f"{row['cpu_ms']:.1f}",
        )
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
    _write(args, {"rows": rows} | made)
    return 0


def _steps(result: dict[str, Any]) -> Table:
    """Step times, and how many times faster than each rung that others are compared with: median and quartiles over rounds."""
    rungs = result["rungs"]
    link = f" on links of {result['link']}" if result["link"] else ""
    disk = f", disks {result['disk']}" if result.get("disk") else ""
    title = f"{result['title']}; {result['workers']} workers{link}{disk}, {result['rounds']} rounds"
    table = Table(title=title, title_justify="left")
    against = list(rungs[0]["ratios"])
    limited = any("of_limit" in rung for rung in rungs)
    wired = any("wire_bytes" in rung for rung in rungs)
    columns = ["rung", "ms/step", "least - most", "CPU ms", "samples/s", *(["MB sent"] if wired else [])]
    columns += [*(f"x {name}" for name in against), *(["of the limit"] if limited else [])]
    for column in columns:
        table.add_column(column, justify="left" if column == "rung" else "right")
    for rung in rungs:
        spread = f"{min(rung['step_ms_all']):.1f} - {max(rung['step_ms_all']):.1f}"
        row = [f"{rung['step_ms']:.1f}", spread, f"{rung['cpu_ms']:.1f}", f"{rung['samples_per_s']:,.0f}"]
        if wired:
            row.append(f"{rung['wire_bytes'] / 1e6:.2f}" if "wire_bytes" in rung else "")
        row += [_median(rung["ratios"][name]) for name in against]
        row += [_median(rung["of_limit"]) if "of_limit" in rung else ""] if limited else []
        table.add_row(rung["name"], *row)
    return table


def _median(spread: dict[str, float]) -> str:
    return "{median:.2f} ({low:.2f} - {high:.2f})".format(**spread)


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
