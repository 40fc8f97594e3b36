"""`nestpipe schedule`: prints a schedule as a grid, proves it exact, and draws it as SVG or as a trace.  No torch needed."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from nestpipe.cli.recipes import read_recipe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nestpipe.schedule.action import Action
    from nestpipe.schedule.clock import ClockSpan
    from nestpipe.schedule.options import Options

MOST_BATCHES, MOST_MICRO_BATCHES = 32, 32
"""What a person would look at, and what `--check` proves in less than a minute."""

HELP = """\
Prints a schedule: which lane does what, and when, by a virtual clock with nominal costs (not measured ones).

  nestpipe schedule dbp                              the grid, for 6 batches
  nestpipe schedule dbp --micro 4 --check            is it exactly serial, whatever the keys?  Exit 1 if not
  nestpipe schedule nested --recipe my.toml --check  the list that my.toml runs, not a default one
  nestpipe schedule dbp --svg dbp.svg --trace dbp.json
  nestpipe schedule run.json --batches 3 --svg run.svg   a real run instead, from what `train --trace run.json` wrote
"""


def add(commands: Any) -> None:
    """Adds the command to the parser's."""
    parser = commands.add_parser(
        "schedule",
        help="print, check or draw a schedule",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("schedule", metavar="S", help="such as serial or dbp; or the trace of a run, FILE.json")
    parser.add_argument("--batches", default="6", metavar="B", help="how many batches; default 6")
    parser.add_argument("--micro", metavar="N", help="micro-batches per batch; default 1, or the recipe's")
    parser.add_argument(
        "--recipe", metavar="R", help="the list that this recipe runs: its disk tier, eviction, clipping and knobs"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the recipe")
    parser.add_argument("--check", action="store_true", help="prove it exact against serial, or say what breaks it")
    parser.add_argument("--svg", metavar="FILE", help="draw it here, to scale")
    parser.add_argument("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev here")
    parser.add_argument("--worker", default="0", metavar="W", help="of a real run: whose lanes; default 0")
    parser.add_argument("--json", metavar="FILE", help="write actions, times and the proof here ('-': standard output)")
    parser.set_defaults(command=_schedule)


def _schedule(args: argparse.Namespace, arguments: list[str]) -> int:
    from nestpipe.schedule import BUILDERS, STALE, build, reference
    from nestpipe.schedule.check import Violation, examine
    from nestpipe.schedule.clock import nominal, run

    name = args.schedule
    if name.endswith(".json"):
        return _draw_run(args)
    if name not in BUILDERS:
        raise ValueError(f"the schedule must be one of {', '.join(BUILDERS)}, not {name!r}")
    batches = _number("--batches", args.batches, MOST_BATCHES)
    micros = _number("--micro", args.micro, MOST_MICRO_BATCHES) if args.micro is not None else None
    for flag in ("svg", "trace", "json"):
        _check_place(f"--{flag}", getattr(args, flag))

    options, micros = _options(args, name, micros)
    actions, serial = build(name, batches, micros, options), build("serial", batches, micros, options)
    spans = run(actions, nominal(actions))
    ends = {n: max(s.stop for s in run(a, nominal(a))) for n, a in (("serial", serial), (name, actions))}
    title = f"{name}: {batches} batch{'es' if batches > 1 else ''}"
    title += f" of {micros} micro-batches" if micros > 1 else ""
    title += f", ends at {ends[name]:g}" + (f" (serial {ends['serial']:g})" if name != "serial" else "")
    console = Console(stderr=args.json == "-")
    _print_grid(console, spans, title)
    result = {"schedule": name, "batches": batches, "micro_batches": micros, "ends": ends, "actions": _rows(spans)}
    code = 0
    if args.check:
        found = examine(
            actions, reference(name, batches, micros, options), name in STALE, average_every=options.average_every
        )
        broken = isinstance(found, Violation)
        exact = not isinstance(found, Violation) and found.exact
        result["check"] = {"exact": exact, "as_designed": not broken, "why": str(found)}
        code = 1 if broken else 0
        label = "broken" if options.average_every or name in STALE else "not exact"
        label = label if isinstance(found, Violation) else found.label
        console.print(f"{label}: {found}", highlight=False, soft_wrap=True, markup=False)
    _write(args, spans, title, result)
    return code


def _options(args: argparse.Namespace, name: str, micros: int | None) -> tuple[Options, int]:
    """The options and the micro-batches of the list: those that a recipe runs with, or the defaults with eviction."""
    from nestpipe.config.pipeline import SCHEDULES, PipelineConfig
    from nestpipe.schedule.options import Workload, resolve

    if args.recipe is None:
        options = resolve(PipelineConfig().changed(schedule=name if name in SCHEDULES else "serial"), Workload())
        # a list that is exact with eviction is exact without; rows retrieved early are never evicted
        return replace(options, evicts=not options.early_retrieve), micros or 1
    from nestpipe.train.build import recipe_options

    recipe = read_recipe(args.recipe, [*args.set, f"pipeline.schedule={name}"])
    given = recipe.pipeline.micro_batches
    if micros is None:
        if isinstance(given, str):
            raise ValueError(f"{args.recipe} has pipeline.micro_batches = '{given}': say with --micro N which to prove")
        micros = given if isinstance(given, int) else max(count for _, count in given)
        if micros > MOST_MICRO_BATCHES:
            raise ValueError(
                f"{args.recipe} has {micros} micro-batches, too many to prove in a minute: give --micro {MOST_MICRO_BATCHES} or "
                "fewer; the list has the same shape for any number"
            )
    return recipe_options(recipe), micros


def _draw_run(args: argparse.Namespace) -> int:
    """A few batches in the middle of a real run, as they ran."""
    from nestpipe.schedule.view.read_trace import excerpt, read_trace
    from nestpipe.schedule.view.svg import svg

    for flag in ("check", "trace", "json"):
        if getattr(args, flag):
            raise ValueError(f"--{flag} is for a schedule; {args.schedule} is a run's trace, which --svg draws")
    worker = _number("--worker", args.worker, 10**6, least=0)
    batches = _number("--batches", args.batches, MOST_BATCHES)
    _check_place("--svg", args.svg)
    spans = excerpt(read_trace(Path(args.schedule), worker), batches)
    end = max(s.stop for s in spans)
    title = f"{Path(args.schedule).stem}, worker {worker}: {batches} batch{'es' if batches > 1 else ''} in {end:.1f} ms"
    console = Console()
    _print_grid(console, [s for s in spans if s.stop - s.start > end / 200], title, "milliseconds of a real run")
    if args.svg:
        Path(args.svg).write_text(svg(spans, title, "milliseconds", to_fit=True), encoding="utf-8")
    return 0


def _number(flag: str, text: str, most: int, least: int = 1) -> int:
    if not (text.isascii() and text.isdigit() and least <= int(text[:9]) <= most):
        raise ValueError(f"{flag} must be a whole number from {least} to {most}, not {text!r}")
    return int(text)


def _check_place(flag: str, place: str | None) -> None:
    """Before the work, and before anything else is written."""
    if place is None or (flag == "--json" and place == "-"):
        return
    folder = Path(place).parent
    if not folder.is_dir() or Path(place).is_dir():
        why = "that is a folder" if folder.is_dir() else f"there is no folder '{folder}'"
        raise ValueError(f"{flag} {place} cannot be written: {why}")


def _print_grid(console: Console, spans: Sequence[ClockSpan], title: str, clock: str = "nominal costs") -> None:
    from nestpipe.schedule.view.grid import grid

    console.print(f"{title}; {clock}", highlight=False, soft_wrap=True)
    for line in grid(spans, console.width, plain=not console.encoding.startswith("utf")):
        console.print(line, soft_wrap=True)


def _rows(spans: Sequence[ClockSpan]) -> list[dict[str, Any]]:
    from nestpipe.schedule.action import label

    def row(action: Action, start: float, stop: float) -> dict[str, Any]:
        named = {"stage": action.stage, "batch": action.batch, "micro": action.micro, "lane": action.lane}
        return {**named, "waits": [label(name) for name in action.waits], "start": start, "stop": stop}

    return [row(s.action, s.start, s.stop) for s in spans]


def _write(args: argparse.Namespace, spans: Sequence[ClockSpan], title: str, result: dict[str, Any]) -> None:
    from nestpipe.schedule.view.svg import svg
    from nestpipe.schedule.view.trace import VIRTUAL, merge

    if args.svg:
        Path(args.svg).write_text(svg(spans, title, "time, nominal costs"), encoding="utf-8")
    if args.trace:
        Path(args.trace).write_text(json.dumps(merge([spans], unit=VIRTUAL)) + "\n")
    if args.json == "-":
        json.dump(result, sys.stdout)
        print()
    elif args.json:
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
