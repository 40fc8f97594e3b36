"""`nestpipe bench`: measures the rungs of a ladder side by side and prints them as tables."""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestpipe.cli.bench_gr import GR, measure_gr, tables
from nestpipe.cli.output import check_writable, console, write_json

if TYPE_CHECKING:
    from rich.table import Table

CLUSTERING = "clustering"
"""Not a ladder, but measured by the same command."""

DESCRIPTION = """\
Runs every rung of a ladder (a TOML file in bench/) several times, interleaved, and compares the step time of the slowest worker:
median, spread, and the ratio to other rungs and to peers.  Exits with 1 if a bound that the ladder sets does not hold.
"""
EPILOG = """\
examples:
  nestpipe bench dlrm --link none                            all rungs, on loopback
  nestpipe bench dlrm --link 500mbit --rounds 8              one host per worker, with shaped links (needs root)
  nestpipe bench dlrm --peers torchrec --page dlrm.html      beside TorchRec, and as a page
  nestpipe bench dlrm --rung "serial N=8" --rung "nested N=8" --json dlrm.json
  nestpipe bench clustering --data ml-1m.zip                 rows sent, by how samples are divided into micro-batches
  nestpipe bench gr --peers hstu=~/generative-recommenders   HSTU and FuXi beside plain torch and a peer's checkout
"""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "bench", help="measure the rungs of a ladder side by side", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("ladder", help="a ladder, such as dlrm; or clustering, or gr")
    parser.add_argument(
        "--peers",
        action="append",
        default=[],
        metavar="P",
        help="also measure this peer: torchrec; gr: hstu=CHECKOUT, fuxi=CHECKOUT",
    )
    parser.add_argument(
        "--rung",
        action="append",
        default=[],
        metavar="NAME",
        dest="rungs",
        help="measure only this rung; repeatable; default: all rungs of the ladder",
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="turns of each rung; default: the ladder's")
    parser.add_argument("--workers", type=int, metavar="N", help="workers of every rung; default: the ladder's")
    parser.add_argument(
        "--link",
        metavar="RATE",
        help="run each worker on a host of its own, a network namespace with a link of this rate, such as 500mbit (needs root); "
        "none: loopback; default: the ladder's",
    )
    parser.add_argument(
        "--disk",
        metavar="RATES",
        help="limit every host's disk to these rates, such as 'read 20000/s, write 20mb/s' (needs root and cgroup v1); "
        "none: no limit; default: the ladder's",
    )
    parser.add_argument(
        "--data", metavar="FILE", help="clustering: also measure on this MovieLens file (u.data, ml-1m.zip)"
    )
    parser.add_argument(
        "--malloc",
        choices=["as shipped", "tuned"],
        help="gr: measure steps with this setting of malloc only; default: with both",
    )
    parser.add_argument(
        "--no-plain",
        action="store_true",
        help="gr: leave out steps of plain padded torch, which take a third of the time",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures here ('-': standard output)")
    parser.add_argument("--page", metavar="FILE.html", help="write them as a page, as `nestpipe report` does")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace, arguments: list[str]) -> int:
    check_writable(args.json)
    check_writable(args.page, "--page")
    made = {"date": datetime.now().strftime("%Y-%m-%d %H:%M"), "command": shlex.join(["nestpipe", *arguments])}
    if args.ladder == GR:
        return _run_gr(args, made)
    return _run_clustering(args, made) if args.ladder == CLUSTERING else _run_ladder(args, made)


def _run_ladder(args: argparse.Namespace, made: dict[str, str]) -> int:
    from nestpipe.lab.ladder import load_ladder
    from nestpipe.lab.running import run_ladder
    from nestpipe.train.display import Display

    if args.malloc is not None or args.no_plain:
        raise ValueError(f"--malloc and --no-plain are for `nestpipe bench {GR}`")
    if args.data is not None:
        raise ValueError(f"--data is for `nestpipe bench {CLUSTERING}`; a ladder generates its own data")
    ladder = load_ladder(args.ladder).only(args.rungs)
    if args.workers is not None:
        ladder = replace(ladder, workers=args.workers)
    if ladder.workers < 1:
        raise ValueError(f"--workers must be at least 1, not {ladder.workers}")
    rounds = args.rounds if args.rounds is not None else ladder.rounds
    if rounds < 1:
        raise ValueError(f"--rounds must be at least 1, not {rounds}")
    peers = args.peers or sorted({rung.peer for rung in ladder.rungs if rung.peer is not None and args.rungs})
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM cleans up hosts and rungs as Ctrl-C does
    with Display(args.ladder) as display:
        link = ladder.link if args.link is None else None if args.link == "none" else args.link
        disk = ladder.disk if args.disk is None else None if args.disk == "none" else args.disk
        result = run_ladder(ladder, peers, rounds, display.show, link, disk)
    out = console(args.json)
    out.print(_steps(result))
    if any("stages" in rung for rung in result["rungs"]):
        out.print(_stages(result))
    for hidden in result["hidden"]:
        out.print(_hidden(hidden))
    mix, best = result.get("mix"), result.get("best")
    if mix is not None:
        out.print(_mix(mix))
    if best is not None:
        out.print(_best(best, result["rungs"]))
    _write(args, result | made)
    return 0 if all(checked["holds"] for checked in (mix, best) if checked is not None) else 1


def _run_gr(args: argparse.Namespace, made: dict[str, str]) -> int:
    result = measure_gr(args)
    out = console(args.json)
    for table in tables(result):
        out.print(table)
    _write(args, result | made)
    return 0


def _run_clustering(args: argparse.Namespace, made: dict[str, str]) -> int:
    from rich.table import Table

    from nestpipe.lab.clustering_bench import measure
    from nestpipe.train.display import Display

    for_ladders = {"--peers": args.peers, "--rung": args.rungs, "--rounds": args.rounds}
    for_ladders |= {"--workers": args.workers, "--link": args.link, "--disk": args.disk, "--malloc": args.malloc}
    for_ladders["--no-plain"] = args.no_plain
    for flag, given in for_ladders.items():
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
    console(args.json).print(table)
    _write(args, {"rows": rows} | made)
    return 0


def _write(args: argparse.Namespace, result: dict[str, Any]) -> None:
    from nestpipe.cli.report import write_report
    from nestpipe.report.bench import shape_bench

    write_json(args.json, result)
    if args.page:
        write_report(Path(args.page), shape_bench(result, args.page), say_on=sys.stderr)


def _best(best: dict[str, Any], rungs: list[dict[str, Any]]) -> str:
    """How the rung with automatic micro-batches compares with the best fixed one."""
    chosen = next(rung for rung in rungs if rung["name"] == best["rung"])["micro_batches_chosen"]
    outcome = "within" if best["holds"] else "NOT within"
    return (
        f"{best['rung']!r} chose {chosen[-1][1]} micro-batches from batch {chosen[-1][0]} on and takes "
        f"{_median(best['ratio'])} of the step of {best['fastest']!r}, the fastest given: {outcome} {best['within']:g}"
    )


def _mix(mix: dict[str, Any]) -> str:
    """What the step of a rung is made of, against what the ladder wants, and the speedup that would be ideal."""
    from nestpipe.lab.ladder import MIX_POINTS

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


def _steps(result: dict[str, Any]) -> Table:
    """Step times, and the speedup over each rung that others are compared with: median and quartiles over rounds."""
    from rich.table import Table

    rungs = result["rungs"]
    link = f" on links of {result['link']}" if result["link"] else ""
    disk = f", disks {result['disk']}" if result.get("disk") else ""
    title = f"{result['title']}; {result['workers']} workers{link}{disk}, {result['rounds']} rounds"
    table = Table(title=title, title_justify="left")
    against = list(rungs[0]["ratios"])
    limited = any("of_limit" in rung for rung in rungs)
    wired = any("wire_bytes" in rung for rung in rungs)
    columns = ["rung", "ms/step", "least - most", "CPU ms", "samples/s", *(["MB sent"] if wired else [])]
    shared = any("compute_share" in rung for rung in rungs)
    columns += ["compute busy"] if shared else []
    columns += [*(f"x {name}" for name in against), *(["of the limit"] if limited else [])]
    for column in columns:
        table.add_column(column, justify="left" if column == "rung" else "right")
    for rung in rungs:
        spread = f"{min(rung['step_ms_all']):.1f} - {max(rung['step_ms_all']):.1f}"
        row = [f"{rung['step_ms']:.1f}", spread, f"{rung['cpu_ms']:.1f}", f"{rung['samples_per_s']:,.0f}"]
        if wired:
            row.append(f"{rung['wire_bytes'] / 1e6:.2f}" if "wire_bytes" in rung else "")
        if shared:
            row.append(f"{rung['compute_share']:.1%}" if "compute_share" in rung else "")
        row += [_median(rung["ratios"][name]) for name in against]
        row += [_median(rung["of_limit"]) if "of_limit" in rung else ""] if limited else []
        table.add_row(rung["name"], *row)
    return table


def _median(spread: dict[str, float]) -> str:
    return "{median:.2f} ({low:.2f} - {high:.2f})".format(**spread)


def _hidden(hidden: dict[str, Any]) -> str:
    """How much of some stages' exposed time another rung hides, by the stages' times and by step times."""
    stages = " and ".join(hidden["stages"])
    return (
        f"{stages}: {hidden['exposed']!r} exposes {hidden['exposed_ms']:.1f} ms a step, {hidden['hidden']!r} "
        f"{hidden['still_exposed_ms']:.1f}: {hidden['hidden_share']:.1%} hidden. "
        f"Step times: {hidden['slower_ms']:.1f} ms more than "
        f"{hidden['without'][0]!r}, {hidden['still_slower_ms']:.1f} more than {hidden['without'][1]!r}: "
        f"{hidden['hidden_share_of_step']:.1%}"
    )


def _stages(result: dict[str, Any]) -> Table:
    """Milliseconds of each stage per step on the slowest worker, and how much of it the step waited for."""
    from rich.table import Table

    rungs = [rung for rung in result["rungs"] if "stages" in rung]
    table = Table(title="stages: busy ms per step, and in brackets how much of it was exposed", title_justify="left")
    table.add_column("rung")
    stages = [stage for stage in rungs[0]["stages"] if any(_is_visible(rung, stage) for rung in rungs)]
    for stage in stages:
        table.add_column(stage, justify="right")
    for rung in rungs:
        cells = [rung["stages"].get(stage, {"busy_ms": 0.0, "exposed_ms": 0.0}) for stage in stages]
        table.add_row(rung["name"], *("{busy_ms:.1f} ({exposed_ms:.1f})".format(**cell) for cell in cells))
    return table


def _is_visible(rung: dict[str, Any], stage: str) -> bool:
    return bool(rung["stages"].get(stage, {}).get("busy_ms", 0.0) >= 0.5)
