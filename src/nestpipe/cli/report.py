"""`nestpipe report`: a run, a trace or a bench as one HTML file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, TextIO

from nestpipe.cli.output import check_writable, write_json

DESCRIPTION = """\
Writes one HTML file that needs no network.  What it shows depends on what it is given: a run directory, a trace or a bench.
"""
EPILOG = """\
examples:
  nestpipe report runs/dlrm-20261116-120000      a run: timeline of lanes, loss, metrics, throughput, exposed time
  nestpipe report run.json                       a trace that `nestpipe train --trace run.json` wrote: its timeline
  nestpipe report ladder.json --out ladder.html  a bench that `nestpipe bench --json ladder.json` wrote: rungs, ratios, stages
"""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "report", help="write a page about a run, a trace or a bench", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("what", metavar="RUN|BENCH", help="a run directory, a trace FILE.json or a bench's FILE.json")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="the page; default: RUN/report.html, or FILE.html beside FILE.json ('-': standard output)",
    )
    parser.add_argument("--json", metavar="FILE", help="write what the page shows here ('-': standard output)")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace, arguments: list[str]) -> int:
    from nestpipe.report.page import page
    from nestpipe.report.read import default_out, read

    what = Path(args.what)
    check_writable(args.out, "--out")
    check_writable(args.json)
    if args.out == args.json == "-":
        raise ValueError("--out and --json cannot both be standard output: give one of them a file")
    out = default_out(what) if args.out is None else Path(args.out)
    for flag, place in (("--out", out), ("--json", args.json)):
        _check_not_input(flag, place, what)
    data = read(what)
    if args.out == "-":
        sys.stdout.write(page(data))
    else:
        write_report(out, data, say_on=sys.stderr if args.json == "-" else sys.stdout)
    write_json(args.json, data)
    return 0


def write_report(out: Path, data: dict[str, Any], say_on: TextIO) -> None:
    """Writes the page and prints its path."""
    from nestpipe.report.page import page, write_page

    try:
        write_page(out, page(data))
    except OSError as error:
        raise ValueError(
            f"{out} cannot be written ({error.strerror or error}): choose another place with --out"
        ) from None
    print(out, file=say_on)


def _check_not_input(flag: str, place: Path | str | None, what: Path) -> None:
    """ValueError if the page would overwrite a file that it is made from."""
    from nestpipe.report.run import FILES

    inputs = [path.resolve() for path in (what, *(what / name for name in FILES))]
    if place is not None and Path(place).resolve() in inputs:
        raise ValueError(f"{flag} {place} is a file that the page is made from: choose another file")
