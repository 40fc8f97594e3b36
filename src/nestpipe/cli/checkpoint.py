"""`nestpipe checkpoint`: lists, inspects, verifies and exports checkpoints."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

HELP = """\
Lists, inspects, verifies and exports checkpoints.  RUN is a run directory, a folder of checkpoints, or one checkpoint
(step-…).

  nestpipe checkpoint ls RUN                          list all checkpoints; marks the best and the last
  nestpipe checkpoint inspect RUN --step 500          show tables, files and data position
  nestpipe checkpoint verify RUN                      read every byte of the last checkpoint and its base
  nestpipe checkpoint export RUN --table item --to item.parquet
                                                      write keys and vectors of a table, for other programs

An exported table can start another training: tables.initial = { item = "item.parquet" } in a recipe creates all of its
rows before the first step, whether or not they are ever trained.
"""


PATIENCE = 3.0
"""Seconds before a command shows its progress."""


def add(commands: Any, parser_class: type[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "checkpoint",
        help="list, inspect, verify and export checkpoints",
        description=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION", parser_class=parser_class)
    ls = actions.add_parser("ls", help="list the checkpoints of a run, and half-written leftovers")
    ls.add_argument(
        "--best", metavar="METRIC", help="mark the best by this metric; default: checkpoint.best of the recipe"
    )
    ls.set_defaults(command=_ls)
    inspect = actions.add_parser("inspect", help="show the tables, files and data position of a checkpoint")
    inspect.set_defaults(command=_inspect)
    verify = actions.add_parser(
        "verify", help="read every byte of a checkpoint and its base, and check digests, shapes, owners and counts"
    )
    verify.add_argument(
        "--all", action="store_true", help="verify all checkpoints of the folder; reads shared bases once"
    )
    verify.set_defaults(command=_verify)
    export = actions.add_parser(
        "export",
        help="write the keys and vectors of a table to a file",
        description="Writes the keys and vectors of one table in the order of the checkpoint's files, with little memory. "
        "FILE.parquet has the columns key and vector (a list of fixed size). FILE.npz has the arrays keys and vectors. "
        "FILE.npy has the vectors, with the keys in FILE.keys.npy beside it.",
    )
    export.add_argument("--table", required=True, metavar="T", help="name of the table, as `inspect` shows it")
    export.add_argument("--to", required=True, metavar="FILE", help="FILE.parquet, FILE.npz or FILE.npy")
    export.add_argument("--state", action="store_true", help="also write optimizer state, as a column or array `state`")
    export.add_argument("--force", action="store_true", help="overwrite FILE if it exists")
    export.set_defaults(command=_export)
    for action in (ls, inspect, verify, export):
        action.add_argument("run", metavar="RUN", help="a run directory, a folder of checkpoints, or one checkpoint")
        if action is not ls:
            action.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step; default: the last")
        if action is not export:
            action.add_argument(
                "--json", metavar="FILE", help="also write the result to FILE as JSON ('-': standard output)"
            )


def _ls(args: argparse.Namespace, arguments: list[str]) -> int:
    from nestpipe.checkpoint.listing import list_folder
    from nestpipe.checkpoint.places import folder_at
    from nestpipe.cli.main import check_json, write_json

    check_json(args.json)
    folder, own = folder_at(Path(args.run))
    listing = list_folder(folder, args.best)
    shown = [one for one in listing.checkpoints if own in (None, one.manifest.step)]
    strays = [stray for stray in listing.strays if own is None or str(own) in stray.name]
    if not shown and not strays:
        raise ValueError(f"no checkpoint in {folder.path}")
    table = _table(str(folder.path), "step", "kind", ("bytes", 1), ("rows", 1), ("workers", 1), "when", "metrics", "")
    lines = []
    for one in shown:
        manifest = one.manifest
        marks = [
            name
            for name, marked in ((f"best {listing.metric}", listing.best), ("last", listing.checkpoints[-1]))
            if marked is one
        ]
        base = [item.name for item in manifest.base]
        rows = sum(group.rows for group in manifest.groups if not group.waiting)
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in manifest.metrics.items() if value is not None)
        table.add_row(
            str(manifest.step),
            "full" if manifest.full else f"incremental on {base[-1]}" + f" and {len(base) - 1} more" * (len(base) > 1),
            _bytes(manifest.bytes),
            f"{rows:,}",
            str(manifest.workers),
            manifest.created,
            metrics,
            ", ".join(marks),
        )
        lines.append(
            {
                "step": manifest.step,
                "full": manifest.full,
                "base": base,
                "bytes": manifest.bytes,
                "rows": rows,
                "workers": manifest.workers,
                "created": manifest.created,
                "metrics": manifest.metrics,
                "marks": [mark.split()[0] for mark in marks],
            }
        )
    _print(args, table, *(f"{stray.name}: {stray.why}" for stray in strays))
    write_json(args.json, {"path": str(folder.path), "checkpoints": lines, "strays": [vars(stray) for stray in strays]})
    return 0


def _inspect(args: argparse.Namespace, arguments: list[str]) -> int:
    import numpy as np

    from nestpipe.checkpoint.listing import recipe_value
    from nestpipe.checkpoint.places import checkpoint_at
    from nestpipe.cli.main import check_json, write_json

    check_json(args.json)
    _, one = checkpoint_at(Path(args.run), args.step)
    manifest = one.manifest
    name = recipe_value(one, "name")
    tables = _table("tables", "tables", ("rows", 1), ("dim", 1), "dtype", "optimizer", ("state", 1), ("bytes", 1))
    groups = []
    for group in manifest.groups:
        size = group.rows * (group.dim + group.state_width) * np.dtype(group.dtype).itemsize
        names = ", ".join(group.tables) + " (keys without a row)" * group.waiting
        row = [names, f"{group.rows:,}", str(group.dim), group.dtype, group.optimizer]
        tables.add_row(*row, str(group.state_width), _bytes(size))
        groups.append({**vars(group), "bytes": size})
    files = _table("files", "file", "kind", ("worker", 1), ("rows", 1), ("bytes", 1))
    for file in manifest.files:
        rows = f"{file.rows:,}" if file.group >= 0 else ""
        files.add_row(file.name, file.kind, str(file.worker), rows, _bytes(file.bytes))
    base = [item.name for item in manifest.base]
    positions = manifest.data.get("positions")
    _print(
        args,
        f"{one.path}: step {manifest.step} of {name or 'a run without a recipe'}, "
        f"{manifest.workers} workers, {manifest.created}",
        "full: has all rows" if manifest.full else f"incremental: has changed rows only; its base is {', '.join(base)}",
        tables,
        files,
        *(
            f"position of data stream {number}: " + "  ".join(f"{key} {value}" for key, value in position.items())
            for number, position in (positions.items() if isinstance(positions, dict) else ())
            if isinstance(position, dict)
        ),
        "  ".join(f"{key} {value:.4g}" for key, value in manifest.metrics.items() if value is not None),
    )
    found = {
        "path": str(one.path),
        "step": manifest.step,
        "recipe": name,
        "workers": manifest.workers,
        "created": manifest.created,
        "base": base,
        "digest": one.digest,
        "groups": groups,
        "files": [vars(file) for file in manifest.files],
        "data": manifest.data,
        "metrics": manifest.metrics,
    }
    write_json(args.json, found)
    return 0


def _verify(args: argparse.Namespace, arguments: list[str]) -> int:
    from nestpipe.checkpoint.check import check_chain
    from nestpipe.checkpoint.errors import CheckpointError
    from nestpipe.checkpoint.manifest import name_of
    from nestpipe.checkpoint.places import folder_at
    from nestpipe.cli.main import check_json, write_json

    check_json(args.json)
    if args.all and args.step is not None:
        raise ValueError("--all and --step cannot be combined")
    folder, own = folder_at(Path(args.run))
    wanted = own if args.step is None else args.step
    if args.all:
        steps = folder.steps()[::-1]
    else:
        steps = [wanted] if wanted is not None else folder.steps()[-1:]
    if not steps or not (folder.path / name_of(steps[0])).is_dir():
        known = ", ".join(map(str, folder.steps()))
        of_step = "" if wanted is None else f" of step {wanted}"
        raise ValueError(f"no checkpoint{of_step} in {folder.path}" + f"; it has {known}" * bool(known))
    done: set[str] = set()
    lines, code = [], 0
    for step in steps:
        try:
            last = folder.read(step)
            if last.digest in done:
                continue
            chain = folder.chain(last)
            with _Progress(f"step {step}") as progress:
                checked = check_chain(chain, progress.show)
        except CheckpointError as error:
            print(f"nestpipe: {' '.join(str(error).split())}", file=sys.stderr)
            lines.append({"step": step, "error": str(error)})
            code = 1
            continue
        done |= {one.digest for one in chain}
        base = checked.checkpoints - 1
        _print(
            args,
            f"step {step} is intact: {checked.rows:,} rows, {checked.files} files, {_bytes(checked.bytes)}"
            + f", with its base of {base} checkpoint{'s' * (base > 1)}" * (base > 0),
        )
        lines.append({"step": step, **vars(checked)})
    write_json(args.json, {"path": str(folder.path), "checked": lines})
    return code


def _export(args: argparse.Namespace, arguments: list[str]) -> int:
    from nestpipe.checkpoint.export import export_table
    from nestpipe.checkpoint.places import checkpoint_at

    folder, last = checkpoint_at(Path(args.run), args.step)
    started = time.perf_counter()
    with _Progress(f"{args.table} of step {last.manifest.step}") as progress:
        made = export_table(
            folder.chain(last),
            args.table,
            Path(args.to),
            state=args.state,
            force=args.force,
            on_progress=progress.show,
        )
    seconds = time.perf_counter() - started
    print(
        f"{args.table} of step {last.manifest.step}: {made.rows:,} rows of {made.dim} {made.dtype} in "
        f"{', '.join(map(str, made.files))} ({_bytes(made.bytes)}, {made.rows / seconds:,.0f} rows/s)"
    )
    return 0


class _Progress:
    """A progress line, for commands that take longer than PATIENCE."""

    def __init__(self, title: str) -> None:
        from nestpipe.train.display import Display

        self._display = Display(title)
        self._stack = ExitStack()
        self._started = time.perf_counter()
        self._shows = False

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def show(self, done: float) -> None:
        if not self._shows and time.perf_counter() - self._started > PATIENCE:
            self._stack.enter_context(self._display)
            self._shows = True
        if self._shows:
            self._display.show(done, "read")


def _table(title: str, *columns: str | tuple[str, int]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
    for column in columns:
        if isinstance(column, str):
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column[0], justify="right")
    return table


def _print(args: argparse.Namespace, *parts: Any) -> None:
    """Prints to standard output, or to standard error if JSON goes there.  Text from a checkpoint is never markup."""
    from rich.console import Console

    from nestpipe.cli.main import PIPE_WIDTH

    console = Console(
        stderr=args.json == "-", width=None if sys.stdout.isatty() else PIPE_WIDTH, markup=False, highlight=False
    )
    for part in parts:
        if part != "":
            console.print(part, soft_wrap=isinstance(part, str))


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
