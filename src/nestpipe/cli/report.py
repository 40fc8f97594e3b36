"""`nestpipe report`: a run, a trace or a bench as one HTML file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HELP = """\
Writes a page to look at: one HTML file that needs no network.  It tells by itself what it was given.

  nestpipe report runs/dlrm-20261116-120000      a run: timeline of lanes, loss, metrics, throughput, what was exposed
  nestpipe report run.json                       a trace, as `train --trace run.json` wrote it: its timeline
  nestpipe report ladder.json --out ladder.html  a bench, as `bench … --json ladder.json` wrote it: rungs, ratios, stages
"""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="write a page of a run, a trace or a bench",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", metavar="RUN|BENCH", help="a run directory, a trace FILE.json or a bench's FILE.json")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the page; default RUN/report.html, or FILE.html beside FILE.json ('-': standard output)",
    )
    parser.add_argument("--json", metavar="FILE", help="write what the page shows here ('-': standard output)")
    parser.set_defaults(command=_report)


def _report(args: argparse.Namespace, arguments: list[str]) -> int:
    from nestpipe.cli.main import check_json, write_json
    from nestpipe.report.page import page
    from nestpipe.report.read import default_out, read

    what = Path(args.what)
    check_json(args.out, "--out")
    check_json(args.json)
    if args.out == args.json == "-":
        raise ValueError("--out and --json cannot both be standard output: give one of them a file")
    out = default_out(what) if args.out is None else Path(args.out)
    for flag, place in (("--out", out), ("--json", args.json)):
        check_not_read(flag, place, what)
    data = read(what)
    if args.out == "-":
        sys.stdout.write(page(data))
    else:
        write(out, data, told=sys.stderr if args.json == "-" else sys.stdout)
    write_json(args.json, data)
    return 0


def write(out: Path, data: dict[str, Any], told: Any) -> None:
    """Writes the page and says where it is."""
    from nestpipe.report.page import page, write_page

    try:
        write_page(out, page(data))
    except OSError as error:
        raise ValueError(
            f"{out} cannot be written ({error.strerror or error}): choose another place with --out"
        ) from None
    print(out, file=told)


def check_not_read(flag: str, place: Path | str | None, what: Path) -> None:
    """What the page is made of is not written over by it."""
    from nestpipe.report.run import FILES

    if place is not None and any(_same(Path(place), read) for read in (what, *(what / name for name in FILES))):
        raise ValueError(f"{flag} {place} is what the page is made of: choose another file")


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()
