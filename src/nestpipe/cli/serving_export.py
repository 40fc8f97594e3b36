"""`nestpipe checkpoint export --for-serving`: writes the export, and says what fewer bits in a row cost."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from nestpipe.cli.checkpoint import Progress, in_bytes

if TYPE_CHECKING:
    from nestpipe.config.recipe import Recipe
    from nestpipe.infer.export import ServingExport


def export_serving(args: argparse.Namespace) -> int:
    from nestpipe.checkpoint.errors import CheckpointError
    from nestpipe.checkpoint.places import checkpoint_at, place_at
    from nestpipe.config.recipe import parse_recipe
    from nestpipe.data.kinds import KINDS as DATA
    from nestpipe.infer.data_shape import shape_of
    from nestpipe.infer.export import export_for_serving, refuse
    from nestpipe.infer.open_run import open_data
    from nestpipe.models.kinds import KINDS as MODELS

    if args.table is not None or args.state or args.force:
        raise ValueError(
            "--for-serving writes all tables, into a new directory: leave out --table, --state and --force"
        )
    to = place_at(args.to)
    if not isinstance(to, Path):
        raise ValueError(f"--to {to}: an export for serving is written to a local directory")
    refuse(to)
    folder, last = checkpoint_at(place_at(args.run), args.step)
    chain = folder.chain(last)
    if not last.manifest.recipe:
        raise CheckpointError(
            f"{last.path} has no recipe, so no model can be built from it: export its tables one by one"
        )
    recipe = parse_recipe(last.manifest.recipe, DATA, MODELS)
    started = time.perf_counter()
    with Progress(f"step {last.manifest.step}") as progress:
        shape, catalogue = shape_of(open_data(recipe, "train"))
        made = export_for_serving(chain, to, shape, catalogue, stored=args.rows, on_progress=progress.show)
    seconds = time.perf_counter() - started
    kind = args.rows or "the numbers of training"
    print(
        f"step {last.manifest.step} in {to}: {len(made.manifest.tables)} tables, {made.rows:,} rows as {kind} "
        f"({in_bytes(made.manifest.bytes)}, {made.rows / seconds:,.0f} rows/s)"
    )
    if args.rows is not None:
        tell_change(recipe, str(last.path), made)
    return 0


def tell_change(recipe: Recipe, checkpoint: str, made: ServingExport) -> None:
    """Prints how far rows moved, and scores of the evaluation data where there are some."""
    import torch

    from nestpipe.infer.open_run import open_data, open_model
    from nestpipe.infer.score_change import score_change

    largest = max((change.largest for change in made.changes.values()), default=0.0)
    relative = max((change.relative for change in made.changes.values()), default=0.0)
    print(f"rows: largest change {largest:.2g}, rms at most {relative:.2g} of a table's values")
    torch.set_num_threads(recipe.train.threads)
    if not Path(checkpoint).is_dir():
        print("scores were not compared: the checkpoint is on object storage")
        return
    source = open_data(recipe, "eval")
    before, after = open_model(checkpoint), open_model(made.path)
    try:
        change = score_change(before, after, source, recipe.eval.batch_size)
    finally:
        before.close()
        after.close()
    print(change if change is not None else "scores were not compared: there is no evaluation data")
