"""The `nestpipe` command: puts the parser together, runs one command, and turns its result into an exit code.

`nestpipe --help` must answer at once, so a command's module imports torch, numba and the rest of the package only when it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from nestpipe.cli import (
    bench,
    checkpoint,
    evicted,
    lab,
    log,
    predict,
    profile,
    recipe,
    report,
    schedule,
    serve,
    simulate,
    train,
    verify,
)
from nestpipe.cli.ending import fail, interrupted, leave
from nestpipe.version import VERSION

COMMANDS = (train, verify, predict, serve, profile, bench, schedule, simulate, lab, report, checkpoint, evicted, recipe)
"""In the order in which `nestpipe --help` lists them.  Each module's `add` adds its parser and sets `command`."""

DESCRIPTION = "Exactly synchronous training of recommendation models with very large embedding tables."
EPILOG = """\
examples:
  nestpipe train dlrm                         train a shipped recipe on local workers
  nestpipe verify dlrm --schedule nested      prove that a schedule changes no bit of the result
  nestpipe predict RUN --to scores.parquet    score the evaluation split, or --data, with a trained model
  nestpipe serve runs/my-ranking-run          serve a ranking model over HTTP
  nestpipe profile my.toml                    find what bounds the step, and what to change
  nestpipe recipe pipeline                    list every key of a recipe's section

exit codes: 0 success; 1 a failure, or a check that does not hold; 2 bad input; 130 interrupted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.  Returns 0 on success, 1 on a failure or a failed check, 2 on bad input, 130 when interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = parser().parse_args(arguments)
    log.configure(getattr(args, "verbose", False))
    try:
        code = int(args.command(args, arguments) or 0)
    except KeyboardInterrupt:
        code = interrupted()
    except Exception as error:
        code = fail(error)
    return leave(code)


class Parser(argparse.ArgumentParser):
    """Accepts no abbreviations (--worker must not silently become --workers), and `-v` before and after the command."""

    def __init__(self, **options: Any) -> None:
        defaults = {"formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(**{**defaults, **options, "allow_abbrev": False})
        self.add_argument(
            "-v",
            "--verbose",
            action="store_true",
            default=argparse.SUPPRESS,
            help="log informational messages, from every worker; by default, worker 0 logs warnings",
        )


def parser() -> Parser:
    main_parser = Parser(prog="nestpipe", description=DESCRIPTION, epilog=EPILOG)
    main_parser.add_argument("--version", action="version", version=f"nestpipe {VERSION}")
    commands = main_parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return main_parser
