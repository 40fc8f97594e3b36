"""`nestpipe evicted`: counts or lists the keys that a run has evicted."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestpipe.cli.output import check_writable, write_json

if TYPE_CHECKING:
    from nestpipe.sparse.evictor import Evicted

DESCRIPTION = """\
Counts the keys that a run has evicted, by table, or lists them: one line per key, with table, key and the batch of the sweep.
"""
EPILOG = """\
examples:
  nestpipe evicted runs/dlrm-20261116-120000
  nestpipe evicted runs/dlrm-20261116-120000 --list --table user > keys.tsv
"""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "evicted", help="count or list the keys that a run has evicted", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument(
        "run", metavar="RUN", help="a run directory; on several machines, each has the keys of its own workers"
    )
    parser.add_argument("--table", metavar="T", help="only keys of this table")
    parser.add_argument("--list", action="store_true", help="list every key, sorted by table, batch and key")
    parser.add_argument("--json", metavar="FILE", help="also write the counts here ('-': standard output)")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace, arguments: list[str]) -> int:
    from nestpipe.train.evicted import read_evicted

    check_writable(args.json)
    if args.list and args.json == "-":
        raise ValueError("--list and --json cannot both write to standard output: give --json a file")
    found = [part for part in read_evicted(Path(args.run)) if args.table in (None, part.table)]
    counts: dict[str, int] = {}
    for part in sorted(found, key=lambda part: part.table):
        counts[part.table] = counts.get(part.table, 0) + len(part.keys)
    if args.list:
        _list(found)
    elif args.json != "-":
        for table, count in counts.items():
            print(f"{table}\t{count}")
    write_json(args.json, {"run": args.run, "evicted": counts, "total": sum(counts.values())})
    if not counts:
        of_table = f" of table {args.table!r}" if args.table else ""
        print(f"nestpipe: no keys{of_table} were evicted in {args.run}", file=sys.stderr)
    return 0


def _list(found: list[Evicted]) -> None:
    """On standard output, whose reader may stop early."""
    keys = ((part.table, part.batch, key) for part in found for key in part.keys.tolist())
    try:
        for table, batch, key in sorted(keys):
            print(f"{table}\t{key}\t{batch}")
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
