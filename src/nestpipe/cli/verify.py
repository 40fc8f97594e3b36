"""`nestpipe verify`: is a schedule, on this recipe and this machine, bit for bit what `serial` is?"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Runs a recipe twice from one seed, under `serial` and under the schedule asked for, and compares losses, every row, every
optimizer state and every dense parameter bit for bit.  Exits 1 and names the first difference where there is one.

  nestpipe verify dlrm --schedule dbp --workers 2 --steps 200
"""


def add_parser(commands: Any, recipe_flags: Callable[[argparse.ArgumentParser], None]) -> None:
    parser = commands.add_parser(
        "verify",
        help="compare a schedule with serial, bit for bit",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    recipe_flags(parser)
    parser.add_argument("--check", choices=["staleness"], help="verify the version of every row that is read, too")
    parser.add_argument("--json", metavar="FILE", help="write the result here too ('-': standard output)")
    parser.add_argument("--quiet", action="store_true", help="no progress line")
    parser.add_argument("--result", help=argparse.SUPPRESS)  # where a launched worker leaves the result for its parent
    parser.set_defaults(command=run, steps=100)


def run(args: argparse.Namespace, arguments: list[str]) -> int:
    from nestpipe.cli.main import check_json, load, write_json

    if "RANK" in os.environ:
        from nestpipe.launch.signals import end_on_signals

        end_on_signals()
        result = _verify_here(args)
        if result is not None and args.result:
            Path(args.result).write_text(json.dumps(result))
            return 0
        return _tell(result) if result is not None else 0
    check_json(args.json)
    recipe = load(args)
    if recipe.train.workers == 1:
        result = _verify_here(args)
    else:
        from nestpipe.launch.launcher import launch

        with tempfile.TemporaryDirectory(prefix="nestpipe-verify-") as folder:
            place = Path(folder) / "result.json"
            launch([*arguments, "--result", str(place)], recipe.train.workers, args.port)
            result = json.loads(place.read_text())
    assert result is not None
    write_json(args.json, result)
    return _tell(result)


def _verify_here(args: argparse.Namespace) -> dict[str, Any] | None:
    """On worker 0 the result, elsewhere None."""
    from nestpipe.cli.main import load
    from nestpipe.launch.launcher import join
    from nestpipe.train.display import Display
    from nestpipe.train.verify import verify

    recipe = load(args)
    world = join(recipe.train.timeout)
    with Display(f"verify {recipe.name}", on=world.rank == 0 and not args.quiet) as display:
        result = verify(recipe, args.steps, world, display.show, check_staleness=args.check == "staleness")
    world.leave()
    return result if world.rank == 0 else None


def _tell(result: dict[str, Any]) -> int:
    compared = result["compared"]
    workers = f"{result['workers']} worker" + "s" * (result["workers"] > 1)
    what = f"{result['schedule']} and serial, {workers}, {result['steps']} steps"
    if result["equal"]:
        evicted = f", {compared['evicted']:,} evicted keys" if compared["evicted"] else ""
        print(
            f"equal: {what}: {compared['losses']} losses, {compared['rows']:,} rows, {compared['state']:,} numbers of optimizer "
            f"state{evicted} and {compared['dense']} dense tensors are the same, bit for bit",
            file=sys.stderr,
        )
        return 0
    print(f"nestpipe: different: {what}: {result['first_difference']['text']}", file=sys.stderr)
    return 1
