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
from nestpipe.cli.bench_tables import best_line, between_hosts_table, hidden_line, mix_line, stages_table, steps_table
from nestpipe.cli.output import check_writable, console, write_json

if TYPE_CHECKING:
    from nestpipe.lab.ladder import Ladder

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
  nestpipe bench dlrm --hosts 2 --workers-per-host 2 --link 500mbit --inside 5gbit
                                                             hosts with several workers, which have a link of their own
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
    parser.add_argument(
        "--workers", type=int, metavar="N", help="workers of every rung, a host for each; default: the ladder's"
    )
    parser.add_argument("--hosts", type=int, metavar="N", help="hosts, instead of --workers; default: the ladder's")
    parser.add_argument("--workers-per-host", type=int, metavar="N", help="workers of each host; default: the ladder's")
    parser.add_argument(
        "--link",
        metavar="RATE",
        help="run each host in a network namespace with a link of this rate, such as 500mbit (needs root); "
        "none: loopback; default: the ladder's",
    )
    parser.add_argument(
        "--inside",
        metavar="RATE",
        help="rate between workers of one host, all of them together, such as 5gbit; none: as fast as loopback is; "
        "default: the ladder's",
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
    ladder = _on_hosts(ladder, args)
    rounds = args.rounds if args.rounds is not None else ladder.rounds
    if rounds < 1:
        raise ValueError(f"--rounds must be at least 1, not {rounds}")
    peers = args.peers or sorted({rung.peer for rung in ladder.rungs if rung.peer is not None and args.rungs})
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM cleans up hosts and rungs as Ctrl-C does
    with Display(args.ladder) as display:
        result = run_ladder(ladder, peers, rounds, display.show, ladder.link, ladder.disk, ladder.inside)
    out = console(args.json)
    out.print(steps_table(result))
    if any(rung.get("between_hosts") for rung in result["rungs"]):
        out.print(between_hosts_table(result["rungs"]))
    if any("stages" in rung for rung in result["rungs"]):
        out.print(stages_table(result))
    for hidden in result["hidden"]:
        out.print(hidden_line(hidden))
    mix, best = result.get("mix"), result.get("best")
    if mix is not None:
        out.print(mix_line(mix))
    if best is not None:
        out.print(best_line(best, result["rungs"]))
    _write(args, result | made)
    return 0 if all(checked["holds"] for checked in (mix, best) if checked is not None) else 1


def _on_hosts(ladder: Ladder, args: argparse.Namespace) -> Ladder:
    """The ladder with the workers, hosts, links and disks that flags ask for."""
    for flag in ("workers", "hosts", "workers_per_host"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise ValueError(f"--{flag.replace('_', '-')} must be at least 1, not {value}")
    if args.workers is not None:
        if args.hosts is not None or args.workers_per_host is not None or ladder.hosts is not None:
            raise ValueError(f"--workers {args.workers}: for hosts give --hosts and --workers-per-host instead")
        ladder = replace(ladder, workers=args.workers)
    if args.hosts is not None or args.workers_per_host is not None:
        hosts, each = args.hosts or ladder.hosts or ladder.workers, args.workers_per_host or ladder.workers_per_host
        ladder = replace(ladder, hosts=hosts, workers_per_host=each)
    ladder = replace(
        ladder,
        link=_chosen(args.link, ladder.link),
        disk=_chosen(args.disk, ladder.disk),
        inside=_chosen(args.inside, ladder.inside),
    )
    if ladder.inside is not None and ladder.link is None:
        if args.inside is not None:
            raise ValueError(f"--inside {ladder.inside} shapes hosts that a link makes: give --link, too")
        ladder = replace(ladder, inside=None)
    return ladder


def _chosen(flag: str | None, of_ladder: str | None) -> str | None:
    return of_ladder if flag is None else None if flag == "none" else flag


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
    for_ladders |= {"--workers": args.workers, "--link": args.link, "--disk": args.disk, "--hosts": args.hosts}
    for_ladders |= {"--workers-per-host": args.workers_per_host, "--inside": args.inside}
    for_ladders |= {"--malloc": args.malloc, "--no-plain": args.no_plain}
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
