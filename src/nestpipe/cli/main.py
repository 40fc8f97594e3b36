"""The command line.  Each command answers bad input with one line that names what to change, and exits non-zero."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

# Heavy imports (torch, numba) stay inside the commands: `nestpipe --help` must answer at once.

RECIPES = Path(__file__).parent.parent / "recipes"
PIPE_WIDTH = 240
"""Columns of a table that goes to a pipe: one line for nearly every key, so that grep finds it."""

TRAIN_HELP = """\
Trains a recipe and writes a run directory: the recipe as run, metrics.jsonl, summary.json, trace.json of the last steps.

  nestpipe train dlrm                                a shipped recipe, by name
  nestpipe train my.toml --workers 4                 four local processes
  nestpipe train dlrm --set model.dim=64 --set tables.lr=0.1
  nestpipe train my.toml --set checkpoint.every_steps=500 --max-restarts 3
  nestpipe train runs/my-20261116-101500 --resume    goes on from the run's last checkpoint, bit for bit
  torchrun --nnodes 2 --nproc-per-node 8 ... -m nestpipe train my.toml   joins a launch on many machines
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 a failure or a check that does not hold, 2 bad input, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parser().parse_args(arguments)
    try:
        return _leave(int(args.command(args, arguments) or 0))
    except KeyboardInterrupt:
        _restore_terminal()
        print("nestpipe: interrupted; all workers were ended", file=sys.stderr)
        return _leave(130)
    except Exception as error:
        return _leave(_fail(error))


def _leave(code: int) -> int:
    """Ends a worker and its launcher here and now: threads of gloo and of torch's launcher may still be in C++, or wait for one
    another, when Python takes itself apart.  Once in a few hundred runs that never ended."""
    if "RANK" in os.environ or "NESTPIPE_REPORTS" in os.environ:  # the latter: this process has launched workers
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _fail(error: Exception) -> int:
    """One line for what a user can mend; a traceback for what only we can."""
    _restore_terminal()
    if "RANK" in os.environ:
        return _fail_as_worker(error)
    message, code = _in_one_line(error)
    if message is None:
        raise error
    print(f"nestpipe: {message}", file=sys.stderr)
    return code


def _fail_as_worker(error: Exception) -> int:
    from nestpipe.launch import launcher as launch

    error = launch.as_peer_lost(error)
    message, code = _in_one_line(error)
    heard = launch.report_failure(error, message or f"{type(error).__name__}: {error}{_place(error)}")
    if message is None:
        traceback.print_exception(error)
    elif not heard:
        print(f"nestpipe: {message}", file=sys.stderr)
    sys.stderr.flush()
    # Not an orderly end: threads of this worker may still be waiting for one that is lost, until a deadline of their own.
    os._exit(code)


FAILURES = {
    "nestpipe.checkpoint.errors.NotWritten",
    "nestpipe.comm.errors.PeerLost",
    "nestpipe.lab.ladder.BenchError",
    "nestpipe.lab.network.LabError",
    "nestpipe.pipeline.pipeline.NotFinite",
    "nestpipe.launch.launcher.LaunchError",
}
"""By name, so that an error need not wait for modules that it has nothing to do with."""


def _in_one_line(error: Exception) -> tuple[str | None, int]:
    text = " ".join(str(error).split())
    if any(f"{kind.__module__}.{kind.__name__}" in FAILURES for kind in type(error).__mro__):
        return text, 1
    if isinstance(error, ValueError | MemoryError | FileNotFoundError | PermissionError):
        return text + _place(error), 2
    if isinstance(error, OSError):
        return (f"{error.filename}: " if error.filename else "") + (error.strerror or text) + _place(error), 1
    return None, 1


def _place(error: BaseException) -> str:
    notes = getattr(error, "__notes__", [])
    return f" ({notes[0]})" if notes else ""


def _restore_terminal() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # a worker that was ended may have left the cursor hidden
        sys.stderr.flush()


class _Command(argparse.ArgumentParser):
    """Takes no abbreviations: --worker must not quietly become --workers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "allow_abbrev": False})


def _parser() -> argparse.ArgumentParser:
    from nestpipe import version
    from nestpipe.cli import checkpoint as cli_checkpoint
    from nestpipe.cli import evicted as cli_evicted
    from nestpipe.cli import lab as cli_lab
    from nestpipe.cli import profile as cli_profile
    from nestpipe.cli import report as cli_report
    from nestpipe.cli import schedule as cli_schedule
    from nestpipe.cli import simulate as cli_simulate
    from nestpipe.cli import verify as cli_verify

    parser = argparse.ArgumentParser(
        prog="nestpipe",
        description="Exactly synchronous training of recommendation models with very large embedding tables.",
    )
    parser.add_argument("--version", action="version", version=f"nestpipe {version.VERSION}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Command)
    train = commands.add_parser(
        "train", help="train a recipe", description=TRAIN_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _recipe_flags(train)
    # torchrun takes --run for its own --run-path even behind the module's name, so there has to be another spelling.
    train.add_argument("--run", "--run-dir", metavar="DIR", help="the run directory; default runs/<recipe>-<time>")
    train.add_argument("--json", metavar="FILE", help="write the summary here too ('-': standard output)")
    train.add_argument("--quiet", action="store_true", help="no progress line")
    train.add_argument("--check", choices=["staleness"], help="verify the version of every row that is read; slower")
    train.add_argument(
        "--trace", metavar="FILE", help="write when every action ran, on all workers, for ui.perfetto.dev"
    )
    train.add_argument(
        "--resume",
        action="store_true",
        help="RECIPE is a run directory: go on from its last checkpoint, on any number of workers",
    )
    train.add_argument(
        "--from",
        type=int,
        metavar="STEP",
        dest="from_step",
        help="with --resume: from the checkpoint of this step; those of later ones are removed",
    )
    train.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="start all workers again, from the last checkpoint, when one fails; at most N times",
    )
    train.set_defaults(command=_train)
    cli_verify.add_parser(commands, _recipe_flags)
    cli_profile.add_parser(commands, _recipe_flags)
    bench = commands.add_parser(
        "bench",
        help="measure the rungs of a ladder side by side",
        description="Runs every rung of a ladder (a TOML file in bench/) several times, interleaved, and compares the slowest "
        "worker's step time: median, spread, and the ratio to each peer.",
    )
    bench.add_argument("ladder", help="such as dlrm; or clustering: rows sent with samples divided in several ways")
    bench.add_argument("--peers", action="append", default=[], metavar="P", help="peers to measure beside: torchrec")
    bench.add_argument(
        "--rung",
        action="append",
        default=[],
        metavar="NAME",
        dest="rungs",
        help="measure this rung; give it several times (default: all of the ladder's)",
    )
    bench.add_argument(
        "--rounds", type=int, metavar="N", help="turns that each rung takes; default what the ladder says"
    )
    bench.add_argument("--workers", type=int, metavar="N", help="workers of every rung; default what the ladder says")
    bench.add_argument(
        "--link",
        metavar="RATE",
        help="a host per worker in network namespaces, with links of this rate, such as 500mbit (needs root); none: loopback; "
        "default what the ladder says",
    )
    bench.add_argument(
        "--disk",
        metavar="RATES",
        help="a disk of these rates for every host, such as 'read 20000/s, write 20mb/s' (needs root and cgroup v1); none: as "
        "fast as it is; default what the ladder says",
    )
    bench.add_argument(
        "--data", metavar="FILE", help="clustering: a MovieLens file (u.data, ml-1m.zip) to measure on, too"
    )
    bench.add_argument("--json", metavar="FILE", help="write all figures here ('-': standard output)")
    bench.add_argument("--page", metavar="FILE.html", help="write a page of them, as `nestpipe report` does")
    bench.set_defaults(command=_bench)
    cli_schedule.add(commands)
    cli_simulate.add(commands)
    cli_lab.add(commands)
    cli_report.add(commands)
    cli_evicted.add(commands)
    cli_checkpoint.add(commands, _Command)
    recipe = commands.add_parser("recipe", help="list every key that a recipe may have")
    recipe.add_argument("kind", nargs="?", help="only keys of this section or kind, such as tables or parquet")
    recipe.set_defaults(command=_recipe)
    return parser


def _recipe_flags(parser: argparse.ArgumentParser) -> None:
    """What every command takes that runs a recipe on workers."""
    parser.add_argument("recipe", help="a TOML file, or the name of a shipped recipe: " + ", ".join(_shipped()))
    parser.add_argument("--workers", type=int, metavar="N", help="local worker processes (train.workers)")
    parser.add_argument("--schedule", metavar="S", help="how stages overlap (pipeline.schedule)")
    parser.add_argument("--steps", type=int, metavar="N", help="stop after N steps (train.steps)")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of everything that is drawn (train.seed)")
    parser.add_argument("--timeout", type=float, metavar="S", help="seconds a worker waits for another (train.timeout)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override any key of the recipe"
    )
    parser.add_argument("--port", type=int, metavar="P", help="port on which local workers meet; default any free one")


def _shipped() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.toml"))


def load(args: argparse.Namespace) -> Any:
    from nestpipe.config.recipe import load_recipe
    from nestpipe.data.kinds import KINDS as DATA
    from nestpipe.models.kinds import KINDS as MODELS

    if getattr(args, "resume", False):
        args.recipe = str(_run_directory(args) / "recipe.toml")
    overrides = list(args.set)
    flags = {"train.workers": args.workers, "pipeline.schedule": args.schedule, "train.steps": args.steps}
    flags |= {"train.seed": args.seed, "train.timeout": args.timeout}
    for key, value in flags.items():
        if value is not None:
            overrides.append(f"{key}={value}")
    recipe = load_recipe(args.recipe, overrides, DATA, MODELS, RECIPES)
    return recipe


def _run_directory(args: argparse.Namespace) -> Path:
    """The run that is to go on; kept in `run`, as the recipe is then that run's."""
    if args.run is None:
        args.run = args.recipe
    run = Path(args.run)
    if not (run / "recipe.toml").is_file():
        raise ValueError(f"--resume needs a run directory, and '{run}' has no recipe.toml")
    if not (run / "recipe.toml").stat().st_size:
        raise ValueError(f"the run in '{run}' ended before it had begun: start anew, without --resume")
    return run


def _resumed(args: argparse.Namespace, recipe: Any) -> tuple[Any, bool]:
    """The checkpoint to go on from, and whether the run is one that goes on."""
    from nestpipe.config.recipe import parse_recipe
    from nestpipe.data.kinds import KINDS as DATA
    from nestpipe.launch.launcher import started_again
    from nestpipe.models.kinds import KINDS as MODELS
    from nestpipe.train.checkpoints import find_resumed, folder_of, refuse_others

    restarted = args.run is not None and started_again(Path(args.run))
    restarts = args.max_restarts or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if args.from_step is not None and restarts:
        raise ValueError(
            "--from goes without restarts, as these go on from the last checkpoint: go back first, and restart from then on"
        )
    if not args.resume and not restarted:
        if args.from_step is not None:
            raise ValueError("--from goes with --resume")
        if args.run is not None or recipe.checkpoint.path is not None:
            refuse_others(recipe, Path(args.run or "."))
        return None, False
    run = Path(args.run)
    resumed = find_resumed(recipe, run, args.from_step, lambda text: parse_recipe(text, DATA, MODELS))
    if resumed is None and not restarted:
        raise ValueError(
            f"no checkpoint in {folder_of(recipe, run).path}: the run ended before its first; start anew, without --resume "
            "and with another --run"
        )
    return resumed, run.exists()


def _train(args: argparse.Namespace, arguments: list[str]) -> int:
    if "RANK" in os.environ:
        from nestpipe.launch.signals import end_on_signals

        end_on_signals()
        return _train_here(args)
    from nestpipe.train.rundir import default_path, refuse_existing

    check_json(args.json)
    check_json(args.trace, "--trace")
    if args.from_step is not None and not args.resume:
        raise ValueError("--from goes with --resume")
    if args.max_restarts < 0:
        raise ValueError(f"--max-restarts must be at least 0, not {args.max_restarts}")
    recipe = load(args)
    if args.max_restarts and not recipe.checkpoint.on:
        raise ValueError("--max-restarts needs checkpoints to go on from: set checkpoint.every_steps or every_minutes")
    # What is wrong with it is said once, and not by every worker and at every start.
    if not _resumed(args, recipe)[1] and args.run is not None:
        refuse_existing(Path(args.run))
    if recipe.train.workers == 1 and not args.max_restarts:
        return _train_here(args)
    from nestpipe.launch.launcher import launch

    run = args.run or str(default_path(recipe.name))
    orderly = recipe.checkpoint.stop_seconds if recipe.checkpoint.on else None
    launch([*arguments, "--run", run], recipe.train.workers, args.port, args.max_restarts, orderly)
    return 0


def _train_here(args: argparse.Namespace) -> int:
    from nestpipe.launch.launcher import join, launch_id, restart_count, started_again, why_restarted
    from nestpipe.train.summary import in_words
    from nestpipe.train.trainer import train

    recipe = load(args)
    if recipe.checkpoint.on and args.run is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "workers of torchrun that write checkpoints need one directory to meet in: give it with --run-dir"
        )
    resumed, resuming = _resumed(args, recipe)
    world = join(recipe.train.timeout)
    if world.rank == 0 and args.run is not None and (restart_count() or started_again(Path(args.run))):
        where = f"going on from step {resumed.step}" if resumed else "starting over, as there is no checkpoint yet"
        print(f"nestpipe: {why_restarted()}; {where}", file=sys.stderr, flush=True)
    summary = train(
        recipe,
        world,
        args.run,
        quiet=args.quiet,
        check_staleness=args.check == "staleness",
        trace=args.trace,
        resumed=resumed,
        resuming=resuming,
        launch=launch_id(),
    )
    if world.rank == 0 and summary.get("stopped"):
        print(
            f"nestpipe: stopped; step {summary['steps']} is saved: go on with nestpipe train {summary['run']} --resume",
            file=sys.stderr,
        )
    elif world.rank == 0:
        _show(summary, in_words(summary["metrics"]))
        write_json(args.json, summary)
    world.leave()
    return 0


def _show(summary: dict[str, Any], metrics: str) -> None:
    console = Console(stderr=True)
    workers = f"{summary['workers']} worker" + "s" * (summary["workers"] > 1)
    console.print(
        f"{summary['recipe']}: {summary['steps']} steps, {summary['samples']:,} samples in {summary['seconds']:.1f} s "
        f"({summary['samples_per_s']:,.0f} samples/s) on {workers}, {summary['rows']:,} rows on the first",
        highlight=False,
        soft_wrap=True,
    )
    _show_stages(console, summary)
    if any(summary["evicted"].values()):
        told = f"{sum(summary['evicted'].values()):,} keys evicted"
        console.print(f"{told}: nestpipe evicted {summary['run']}", highlight=False, soft_wrap=True)
    if "skipped" in summary:
        parts = summary["skipped"]["parts"]
        named = ", ".join(parts[:3]) + " ..." * (len(parts) > 3)
        console.print(
            f"{len(parts)} part{'s' * (len(parts) > 1)} of the training data could not be read and "
            f"{summary['skipped']['samples']:,} samples an epoch were left out: {named}",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"[bold]{metrics}[/bold]", highlight=False, soft_wrap=True)
    console.print(f"run {summary['run']}  digest {summary['digest'][:16]}", highlight=False, soft_wrap=True)


def _show_stages(console: Console, summary: dict[str, Any]) -> None:
    """Per stage what was hidden and what the step had to wait for; the exposed column adds up to the step."""
    table = Table(box=None, pad_edge=False, title_justify="left", title=f"a step of {summary['step_ms']:.1f} ms")
    table.add_column("stage")
    for column in ("busy ms", "hidden", "exposed", "of step"):
        table.add_column(column, justify="right")
    for stage, ms in summary["stages"].items():
        if ms["busy_ms"] >= 0.05 or ms["exposed_ms"] >= 0.05:
            share = ms["exposed_ms"] / max(summary["step_ms"], 1e-9)
            numbers = [f"{ms[kind]:.1f}" for kind in ("busy_ms", "hidden_ms", "exposed_ms")]
            table.add_row(stage, *numbers, f"{share:.0%}", style="dim" if share < 0.005 else None)
    console.print(table, highlight=False)
    if summary["windows_by_micro"]:
        console.print(
            f"{summary['windows_by_micro']:,} of {summary['steps']:,} batches of worker 0 were deduplicated per micro-batch, "
            "which sends more rows: their windows would have passed memory.window_limit",
            highlight=False,
        )


def check_json(place: str | None, flag: str = "--json") -> None:
    """Before hours of work, not after them."""
    if place and place != "-":
        folder = Path(place).parent
        if not folder.is_dir() or Path(place).is_dir():
            why = "that is a folder" if folder.is_dir() else f"there is no folder '{folder}'"
            raise ValueError(f"{flag} {place} cannot be written: {why}")


def write_json(place: str | None, what: dict[str, Any]) -> None:
    from nestpipe.train.rundir import plain

    if place == "-":
        print(json.dumps(plain(what), allow_nan=False))
    elif place:
        Path(place).write_text(json.dumps(plain(what), allow_nan=False, indent=2) + "\n")


def _bench(args: argparse.Namespace, arguments: list[str]) -> int:
    from nestpipe.cli.bench import bench

    return bench(args, arguments)


def _recipe(args: argparse.Namespace, arguments: list[str]) -> int:
    from nestpipe.config.describe import describe
    from nestpipe.data.kinds import KINDS as DATA
    from nestpipe.models.kinds import KINDS as MODELS

    table = Table(title="Keys of a recipe" + (f" ({args.kind})" if args.kind else ""), box=None, pad_edge=False)
    for column in ("key", "of kind", "must be", "default", "what it does"):
        table.add_column(column, overflow="fold", no_wrap=column == "key")
    rows = 0
    for key in describe(DATA, MODELS):
        if args.kind in (None, key.kind, key.key.split(".")[0]):
            table.add_row(key.key, key.kind or "", key.type, key.default, key.help)
            rows += 1
    if not rows:
        kinds = ["data", "model", "tables", "dense", "pipeline", "train", "eval", *DATA, *MODELS]
        raise ValueError(f"no section or kind {args.kind!r}; there are {', '.join(kinds)}")
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
    return 0
