"""`nestpipe predict`: scores of a data set from a trained model, into a Parquet file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from nestpipe.cli.output import check_writable, console, write_json

DESCRIPTION = """\
Scores data with a trained model, on this machine and without a training pipeline.  RUN is a run directory, which may still be
training, a checkpoint (step-...), or an export for serving.

  clicks        columns row, probability, logit, and label where the data has one
  sequences     columns row, items, scores: the best items that are not in the history, best first
"""
EPILOG = """\
examples:
  nestpipe predict runs/dlrm-20261116-120000 --to scores.parquet              the recipe's evaluation split
  nestpipe predict runs/dlrm-20261116-120000 --data 'new/*.parquet' --to scores.parquet
  nestpipe predict dlrm-500 --data new.parquet --to scores.parquet --memory 2GB
                                                      an export whose tables are larger than memory
"""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "predict", help="score data with a trained model", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("run", metavar="RUN", help="a run directory, a checkpoint, or an export for serving")
    parser.add_argument("--to", required=True, metavar="FILE", help="FILE.parquet; appears when it is complete")
    parser.add_argument("--data", metavar="D", help="files, a glob or a folder in place of the recipe's data")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step; default: the last")
    parser.add_argument("--top", type=int, default=10, metavar="K", help="items for each user; default: 10")
    parser.add_argument(
        "--batch-size", type=int, metavar="B", help="samples at a time; default: eval.batch_size of the recipe"
    )
    parser.add_argument(
        "--memory",
        metavar="BYTES",
        help="with an export: keep so many bytes of rows, such as 2GB, and read others from disk",
    )
    parser.add_argument("--json", metavar="FILE", help="also write what was done here ('-': standard output)")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace, arguments: list[str]) -> int:
    import torch

    from nestpipe.infer.open_run import open_data, open_model
    from nestpipe.infer.predict import predict_to, with_data
    from nestpipe.train.display import Display

    check_writable(args.json)
    check_writable(args.to, "--to")
    to = Path(args.to)
    if to.suffix != ".parquet":
        raise ValueError(f"--to {to} must end in .parquet")
    for name in ("top", "batch_size"):
        if (given := getattr(args, name)) is not None and given < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {given}")
    memory = None if args.memory is None else bytes_in(args.memory, "--memory")
    with Display(f"opening {args.run}") as display:
        opened = open_model(args.run, memory, step=args.step, on_progress=display.show)
    torch.set_num_threads(opened.recipe.train.threads)  # as in training: other numbers of threads may round differently
    try:
        recipe = opened.recipe if args.data is None else with_data(opened.recipe, args.data)
        with Display(f"predicting with step {opened.step}") as display:
            source = open_data(recipe, "score", display.show)
            done = predict_to(
                opened,
                source,
                to,
                batch_size=args.batch_size or recipe.eval.batch_size,
                top=args.top,
                on_progress=lambda part, rows: display.show(part, f"{rows:,} rows"),
            )
    finally:
        opened.close()
    rate = done.rows / done.seconds
    console(args.json).print(
        f"{done.rows:,} rows in {to}, by step {opened.step} of {opened.recipe.name} ({rate:,.0f} rows/s)",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    summary = {"to": str(to), "rows": done.rows, "seconds": done.seconds, "rows_per_s": rate}
    write_json(args.json, {**summary, "model": opened.place, "step": opened.step, "version": opened.version})
    return 0


def bytes_in(text: str, flag: str) -> int:
    """2GB, 500MB, 64kB or a plain number, in bytes.  ValueError otherwise."""
    units = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "b": 1, "": 1}
    number = text.strip().lower()
    unit = next(unit for unit in units if number.endswith(unit))
    try:
        found = int(float(number.removesuffix(unit)) * units[unit])
    except (ValueError, OverflowError):
        found = 0
    if found < 1:
        raise ValueError(f"{flag} must be a size such as 2GB or 500MB, not {text!r}")
    return found
