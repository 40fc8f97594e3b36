"""`nestpipe checkpoint`: lists, inspects and verifies checkpoints, and exports their tables for other programs."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from nestpipe.cli.output import check_writable, console, write_json

if TYPE_CHECKING:
    from rich.table import Table

DESCRIPTION = """\
Looks at checkpoints.  RUN is a run directory, a folder of checkpoints, or one checkpoint (step-...): a path, or a URL such as
s3://bucket/run.
"""
EPILOG = """\
examples:
  nestpipe checkpoint ls RUN                          list them, and which is the best and which the last
  nestpipe checkpoint inspect RUN --step 500          tables, files, position in the data
  nestpipe checkpoint verify RUN                      read every byte of the last one and of its chain
  nestpipe checkpoint export RUN --table item --to item.parquet
                                                      write keys and vectors of a table, for other programs

Another training can start from an exported table: tables.initial = { item = "item.parquet" } in a recipe loads all of its
rows before the first step, whether or not they are ever trained.
"""
EXPORT = """\
Writes the keys and vectors of one table, in the order in which the checkpoint has them, with little memory.

  FILE.parquet    the columns key and vector (a list of fixed size)
  FILE.npz        the arrays keys and vectors
  FILE.npy        the vectors, with the keys in FILE.keys.npy beside it

With --for-serving: all tables, the dense model and the recipe, as a directory that `nestpipe predict` and a server open without
the training data, and whose tables may be larger than memory.
"""
EXPORT_EPILOG = """\
examples:
  nestpipe checkpoint export runs/dlrm-20261116-120000 --table item --to item.parquet
  nestpipe checkpoint export runs/dlrm-20261116-120000 --step 500 --table item --to item.npy --state
  nestpipe checkpoint export runs/dlrm-20261116-120000 --for-serving --to dlrm-500 --rows int8
"""

QUIET_SECONDS = 3.0
"""A command that takes longer shows its progress."""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "checkpoint", help="list, inspect, verify and export checkpoints", description=DESCRIPTION, epilog=EPILOG
    )
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    ls = _add_action(actions, "ls", "list the checkpoints of a run, and those that are incomplete")
    ls.add_argument(
        "--best", metavar="METRIC", help="mark the best by this metric; default: checkpoint.best of the recipe"
    )
    ls.set_defaults(command=_ls)
    inspect = _add_action(actions, "inspect", "show what is in a checkpoint: tables, files, position in the data")
    inspect.set_defaults(command=_inspect)
    verify = _add_action(
        actions, "verify", "read every byte of a checkpoint and of its chain: digests, shapes, owners, counts"
    )
    verify.add_argument("--all", action="store_true", help="all checkpoints; files that they share are read once")
    verify.set_defaults(command=_verify)
    export = actions.add_parser(
        "export", help="write the keys and vectors of a table to a file", description=EXPORT, epilog=EXPORT_EPILOG
    )
    export.add_argument("--table", metavar="T", help="name of the table, as `inspect` shows it")
    export.add_argument(
        "--to", required=True, metavar="FILE", help="FILE.parquet, FILE.npz or FILE.npy; with --for-serving a directory"
    )
    export.add_argument("--for-serving", action="store_true", help="all tables and the dense model, as a directory")
    export.add_argument(
        "--rows",
        choices=("float16", "int8"),
        help="with --for-serving: store rows in fewer bits, and tell how far scores move; default: as trained",
    )
    export.add_argument("--state", action="store_true", help="also the optimizer state, as a column or array `state`")
    export.add_argument("--force", action="store_true", help="overwrite FILE if it exists")
    export.set_defaults(command=_export)
    for action in (ls, inspect, verify, export):
        action.add_argument("run", metavar="RUN", help="a run directory, a folder of checkpoints, or one checkpoint")
        if action is not ls:
            action.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step; default: the last")
        if action is not export:
            action.add_argument("--json", metavar="FILE", help="also write all of it here ('-': standard output)")


def _add_action(actions: Any, name: str, what: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.")
    return parser


def _ls(args: argparse.Namespace, arguments: list[str]) -> int:
    from nestpipe.checkpoint.listing import list_folder
    from nestpipe.checkpoint.places import folder_at, place_at

    check_writable(args.json)
    folder, own = folder_at(place_at(args.run))
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
        bases = [base.name for base in manifest.base]
        rows = sum(group.rows for group in manifest.groups if not group.waiting)
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in manifest.metrics.items() if value is not None)
        table.add_row(
            str(manifest.step),
            "full"
            if manifest.full
            else f"incremental on {bases[-1]}" + f" and {len(bases) - 1} more" * (len(bases) > 1),
            in_bytes(manifest.bytes),
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
                "base": bases,
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
    from nestpipe.checkpoint.places import checkpoint_at, place_at

    check_writable(args.json)
    _, one = checkpoint_at(place_at(args.run), args.step)
    manifest = one.manifest
    name = recipe_value(one, "name")
    tables = _table("tables", "tables", ("rows", 1), ("dim", 1), "dtype", "optimizer", ("state", 1), ("bytes", 1))
    groups = []
    for group in manifest.groups:
        size = group.rows * (group.dim + group.state_width) * np.dtype(group.dtype).itemsize
        names = ", ".join(group.tables) + " (keys without a row)" * group.waiting
        row = [names, f"{group.rows:,}", str(group.dim), group.dtype, group.optimizer]
        tables.add_row(*row, str(group.state_width), in_bytes(size))
        groups.append({**vars(group), "bytes": size})
    files = _table("files", "file", "kind", ("worker", 1), ("rows", 1), ("bytes", 1))
    for file in manifest.files:
        rows = f"{file.rows:,}" if file.group >= 0 else ""
        files.add_row(file.name, file.kind, str(file.worker), rows, in_bytes(file.bytes))
    bases = [base.name for base in manifest.base]
    positions = manifest.data.get("positions")
    _print(
        args,
        f"{one.path}: step {manifest.step} of {name or 'a run without a recipe'}, "
        f"{manifest.workers} workers, {manifest.created}",
        "full: has all rows"
        if manifest.full
        else f"incremental: has changed rows only; its base is {', '.join(bases)}",
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
        "base": bases,
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
    from nestpipe.checkpoint.places import folder_at, place_at

    check_writable(args.json)
    if args.all and args.step is not None:
        raise ValueError("--all and --step cannot be combined")
    folder, own = folder_at(place_at(args.run))
    wanted = own if args.step is None else args.step
    if args.all:
        steps = folder.steps()[::-1]
    else:
        steps = [wanted] if wanted is not None else folder.steps()[-1:]
    if not steps or all(one.step != steps[0] for one in folder.found()):
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
            with Progress(f"step {step}") as progress:
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
            f"step {step} is intact: {checked.rows:,} rows, {checked.files} files, {in_bytes(checked.bytes)}"
            + f", with its base of {base} checkpoint{'s' * (base > 1)}" * (base > 0),
        )
        lines.append({"step": step, **vars(checked)})
    write_json(args.json, {"path": str(folder.path), "checked": lines})
    return code


def _export(args: argparse.Namespace, arguments: list[str]) -> int:
    from nestpipe.checkpoint.export import export_table
    from nestpipe.checkpoint.places import checkpoint_at, place_at

    if args.for_serving:
        from nestpipe.cli.serving_export import export_serving

        return export_serving(args)
    if args.table is None:
        raise ValueError("give --table T, the table to write, or --for-serving")
    if args.rows is not None:
        raise ValueError("--rows is for --for-serving: leave it out")
    folder, last = checkpoint_at(place_at(args.run), args.step)
    started = time.perf_counter()
    with Progress(f"{args.table} of step {last.manifest.step}") as progress:
        made = export_table(
            folder.chain(last),
            args.table,
            place_at(args.to),
            state=args.state,
            force=args.force,
            on_progress=progress.show,
        )
    seconds = time.perf_counter() - started
    print(
        f"{args.table} of step {last.manifest.step}: {made.rows:,} rows of {made.dim} {made.dtype} in "
        f"{', '.join(map(str, made.files))} ({in_bytes(made.bytes)}, {made.rows / seconds:,.0f} rows/s)"
    )
    return 0


class Progress:
    """Progress of a command that takes longer than QUIET_SECONDS."""

    def __init__(self, title: str) -> None:
        from nestpipe.train.display import Display

        self._display = Display(title)
        self._stack = ExitStack()
        self._started = time.perf_counter()
        self._shown = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def show(self, done: float) -> None:
        if not self._shown and time.perf_counter() - self._started > QUIET_SECONDS:
            self._stack.enter_context(self._display)
            self._shown = True
        if self._shown:
            self._display.show(done, "read")


def _table(title: str, *columns: str | tuple[str, int]) -> Table:
    """A table whose columns are text, or numbers where given as a tuple."""
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
    """Prints text and tables.  A checkpoint's own names are text and never markup."""
    out = console(args.json, markup=False, highlight=False)
    for part in parts:
        if part != "":
            out.print(part, soft_wrap=isinstance(part, str))


def in_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
