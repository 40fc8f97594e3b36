"""`nestpipe train`: trains a recipe on local workers, or joins the workers of a torchrun launch."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestpipe.cli.output import check_writable, write_json
from nestpipe.cli.recipes import add_recipe_arguments, recipe_from
from nestpipe.cli.workers import is_worker

if TYPE_CHECKING:
    from nestpipe.config.recipe import Recipe
    from nestpipe.train.checkpoints import Resumed

log = logging.getLogger("nestpipe.cli.train")

DESCRIPTION = """\
Trains a recipe and writes a run directory: the recipe as run, metrics.jsonl, summary.json, trace.json of the last steps, and
report.html, a page to look at.
"""
EPILOG = """\
examples:
  nestpipe train dlrm                                a shipped recipe, by name
  nestpipe train my.toml --workers 4                 four local processes
  nestpipe train dlrm --set model.dim=64 --set tables.lr=0.1
  nestpipe train my.toml --set checkpoint.every_steps=500 --max-restarts 3
  nestpipe train my.toml --log tensorboard           then: tensorboard --logdir runs
  nestpipe train runs/my-20261116-101500 --resume    resume from the run's last checkpoint, bit for bit
  torchrun --nnodes 2 --nproc-per-node 8 ... -m nestpipe train my.toml   join a launch on several machines
"""


def add(commands: Any) -> None:
    parser = commands.add_parser("train", help="train a recipe", description=DESCRIPTION, epilog=EPILOG)
    add_recipe_arguments(parser)
    # torchrun takes --run for its own --run-path even behind the module's name, hence the second spelling.
    parser.add_argument("--run", "--run-dir", metavar="DIR", help="the run directory; default: runs/<recipe>-<time>")
    parser.add_argument("--json", metavar="FILE", help="also write the summary here ('-': standard output)")
    parser.add_argument("--quiet", action="store_true", help="show no progress")
    parser.add_argument("--check", choices=["staleness"], help="verify the version of every row that is read; slower")
    parser.add_argument(
        "--trace", metavar="FILE", help="write when every action ran, on all workers, for ui.perfetto.dev"
    )
    parser.add_argument(
        "--log",
        choices=["tensorboard"],
        help="also write what metrics.jsonl has as TensorBoard events, into RUN/tensorboard; a resumed run goes on with it",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="RECIPE is a run directory: resume from its last checkpoint, on any number of workers",
    )
    parser.add_argument(
        "--from",
        type=int,
        metavar="STEP",
        dest="from_step",
        help="with --resume: resume from the checkpoint of this step and remove later ones",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="when a worker fails, restart all workers from the last checkpoint, at most N times; default: 0",
    )
    parser.set_defaults(command=run)


def run(args: argparse.Namespace, arguments: list[str]) -> int:
    if is_worker():
        from nestpipe.launch.signals import end_on_signals

        end_on_signals()
        return _train_here(args)
    from nestpipe.files.url import is_url
    from nestpipe.train.rundir import default_path, refuse_existing, remove_half_files

    # Check everything here, so that an error is reported once and not by every worker at every start.
    check_writable(args.json)
    check_writable(args.trace, "--trace")
    if args.from_step is not None and not args.resume:
        raise ValueError("--from needs --resume")
    if args.max_restarts < 0:
        raise ValueError(f"--max-restarts must be at least 0, not {args.max_restarts}")
    if is_url(args.run or ""):
        raise ValueError(
            f"--run {args.run}: a run directory is local; set checkpoint.path to keep checkpoints elsewhere"
        )
    recipe = _recipe(args)
    if args.max_restarts and not recipe.checkpoint.on:
        raise ValueError(
            "--max-restarts needs checkpoints to resume from: set checkpoint.every_steps or checkpoint.every_minutes"
        )
    _, existing = _resume_point(args, recipe)
    _wants_tensorboard(args, existing)
    if not existing and args.run is not None:
        refuse_existing(Path(args.run))
    if recipe.train.workers == 1 and not args.max_restarts:
        return _train_here(args)
    from nestpipe.launch.launcher import launch

    path = args.run or str(default_path(recipe.name))
    stop_seconds = recipe.checkpoint.stop_seconds if recipe.checkpoint.on else None
    try:
        launch([*arguments, "--run", path], recipe.train.workers, args.port, args.max_restarts, stop_seconds)
    finally:
        remove_half_files(path)  # of a worker that was ended in the middle of its last words
    return 0


def _train_here(args: argparse.Namespace) -> int:
    """Trains as one worker, or as the only one."""
    from nestpipe.launch.join import join
    from nestpipe.launch.restarts import launch_id
    from nestpipe.train.summary import in_words
    from nestpipe.train.trainer import train

    recipe = _recipe(args)
    if recipe.checkpoint.on and args.run is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "under torchrun, a run that writes checkpoints needs a directory for all workers: set --run-dir"
        )
    resumed, existing = _resume_point(args, recipe)
    tensorboard = _wants_tensorboard(args, existing)
    world = join(recipe.train.timeout)
    if world.rank == 0:
        _log_restart(args, resumed)
    summary = train(
        recipe,
        world,
        args.run,
        quiet=args.quiet,
        check_staleness=args.check == "staleness",
        trace=args.trace,
        resumed=resumed,
        resuming=existing,
        launch=launch_id(),
        tensorboard=tensorboard,
    )
    if world.rank == 0 and summary.get("stopped"):
        resume = f"nestpipe train {summary['run']} --resume"
        print(f"nestpipe: stopped; step {summary['steps']} is saved: resume with {resume}", file=sys.stderr)
    elif world.rank == 0:
        from nestpipe.cli.summary import show_summary

        show_summary(summary, in_words(summary["metrics"]), _write_page(Path(summary["run"])))
        write_json(args.json, summary)
    world.leave()
    return 0


def _write_page(run: Path) -> Path | None:
    """The run's report page.  A run that trained for hours does not fail because its page cannot be written."""
    from nestpipe.report.page import page, write_page
    from nestpipe.report.read import default_out, read

    out = default_out(run)
    try:
        write_page(out, page(read(run)))
    except (OSError, ValueError) as error:
        log.warning("%s was not written: %s", out, error)
        return None
    return out


def _recipe(args: argparse.Namespace) -> Recipe:
    """The recipe that the arguments name; with `--resume`, the one in the run directory, which `args.run` then is."""
    if args.resume:
        args.run = args.run or args.recipe
        path = Path(args.run) / "recipe.toml"
        if not path.is_file():
            raise ValueError(f"--resume needs a run directory, and '{args.run}' has no recipe.toml")
        if not path.stat().st_size:
            raise ValueError(f"the run in '{args.run}' ended before it started: train again without --resume")
        args.recipe = str(path)
    return recipe_from(args)


def _resume_point(args: argparse.Namespace, recipe: Recipe) -> tuple[Resumed | None, bool]:
    """The checkpoint to resume from, and whether the run directory exists and is this run's own."""
    from nestpipe.config.recipe import parse_recipe
    from nestpipe.data.kinds import KINDS as DATA
    from nestpipe.launch.restarts import started_again
    from nestpipe.models.kinds import KINDS as MODELS
    from nestpipe.train.checkpoints import find_resumed, folder_of, refuse_others

    restarted = args.run is not None and started_again(Path(args.run))
    restarts = args.max_restarts or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if args.from_step is not None and restarts:
        raise ValueError(
            "--from excludes restarts, which resume from the last checkpoint: train from that step first, then add restarts"
        )
    if not args.resume and not restarted:
        if args.from_step is not None:
            raise ValueError("--from needs --resume")
        if args.run is not None or recipe.checkpoint.path is not None:
            refuse_others(recipe, Path(args.run or "."))
        return None, False
    path = Path(args.run)
    resumed = find_resumed(recipe, path, args.from_step, lambda text: parse_recipe(text, DATA, MODELS))
    if resumed is None and not restarted:
        raise ValueError(
            f"no checkpoint in {folder_of(recipe, path).path}: the run ended before its first; train again without --resume "
            "and with another --run"
        )
    return resumed, path.exists()


def _wants_tensorboard(args: argparse.Namespace, existing: bool) -> bool:
    """With `--log tensorboard`, or for a run that resumes and has events: they would end, or show steps that were taken back."""
    from nestpipe.train.tensorboard import FOLDER, check_installed

    wants = args.log == "tensorboard" or (existing and (Path(args.run) / FOLDER).is_dir())
    if wants:
        check_installed()
    return wants


def _log_restart(args: argparse.Namespace, resumed: Resumed | None) -> None:
    from nestpipe.launch.restarts import restart_count, started_again, why_restarted

    if args.run is not None and (restart_count() or started_again(Path(args.run))):
        where = f"resuming from step {resumed.step}" if resumed else "starting over, as there is no checkpoint yet"
        log.warning("%s; %s", why_restarted(), where)
    elif resumed is not None:
        log.info("resuming from step %d", resumed.step)
