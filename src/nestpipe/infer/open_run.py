"""Opens a run, a checkpoint or an export for serving as a model that scores.  Imports no training code.

The model comes from the recipe that is kept with the weights.  Weights are read as safetensors and execute nothing; a class of
your own that the recipe names (`module:Class`) is imported, as in training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from nestpipe.checkpoint.dense import load_model
from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.checkpoint.folder import Checkpoint
from nestpipe.checkpoint.places import folder_at, place_at
from nestpipe.checkpoint.tensors import read_arrays, read_tensors
from nestpipe.config.recipe import Recipe, parse_recipe
from nestpipe.data.batch import Batch
from nestpipe.data.kinds import KINDS as DATA
from nestpipe.data.own import check_source
from nestpipe.data.source import DataError, Source
from nestpipe.files import FileError, Location
from nestpipe.infer.checkpoint_rows import HeldFiles
from nestpipe.infer.data_shape import ShapedSource
from nestpipe.infer.row_reader import Rows, rows_of_checkpoint, rows_of_export
from nestpipe.infer.row_source import attach_reader, tables_of
from nestpipe.infer.serving_files import ServingManifest, is_export, read_serving
from nestpipe.models.build import build_model
from nestpipe.models.kinds import KINDS as MODELS
from nestpipe.models.next_item import NextItemConfig

TRIES = 10
"""How often a checkpoint may vanish while it is being opened before that is an error."""


@dataclass(frozen=True)
class OpenModel:
    """A model with its tables, ready to score.  Nothing of it is trained or written."""

    model: nn.Module
    rows: Rows
    recipe: Recipe
    source: Source
    """What the model was built for: the training data, or, from an export, only its shape."""
    place: str
    step: int
    version: str
    """Digest of the checkpoint: unique per weights.  An export in fewer bits has one of its own."""

    def outputs(self, batch: Batch) -> Any:
        """What the model returns beside the loss, as an evaluation in training would get it."""
        bf16 = self.recipe.train.precision == "bf16"
        cast = torch.autocast("cpu", dtype=torch.bfloat16) if bf16 else contextlib.nullcontext()
        with torch.no_grad(), cast:
            return self.model(batch)[1]

    def close(self) -> None:
        self.rows.close()


def open_model(
    path: str | Path,
    memory: int | None = None,
    *,
    step: int | None = None,
    on_progress: Callable[[float, str], None] = lambda done, what: None,
) -> OpenModel:
    """The model of a run directory, a folder of checkpoints, a checkpoint, or an export for serving.

    A run may still be training: its newest checkpoint is opened, and what is open stays whole when the run removes it.
    `memory`: bytes for rows of an export, which are then read from disk; None: memory-mapped.  CheckpointError, in one line.
    """
    place = place_at(str(path))
    if memory is not None and memory < 1:
        raise ValueError(f"memory must be at least 1 byte, not {memory}")
    if isinstance(place, Location):
        raise CheckpointError(
            f"{place}: inference reads local files; `nestpipe checkpoint export {place} --for-serving --to DIR` makes some"
        )
    if is_export(place):
        if step is not None:
            raise CheckpointError(f"'{place}' is an export of one step: leave --step out")
        return _open_export(place, memory)
    folder, own = folder_at(place)
    if step is not None and own not in (None, step):
        raise CheckpointError(f"'{place}' is the checkpoint of step {own}: leave --step out")
    wanted = own if step is None else step
    for _ in range(TRIES):
        newest = folder.steps()[-1:]
        try:
            last = folder.find(wanted)
            if last is None:
                raise CheckpointError(f"no checkpoint in {folder.path}")
            chain = folder.chain(last)
            held = HeldFiles(chain)
        except CheckpointError:
            if wanted is None and (now := folder.steps()[-1:]) and now != newest:
                continue  # the run has removed it meanwhile: there is a newer one
            raise
        return _open_checkpoint(held, chain, memory, on_progress)
    raise CheckpointError(f"{folder.path}: checkpoints vanish faster than they can be opened: raise checkpoint.keep")


def _open_checkpoint(
    held: HeldFiles, chain: list[Checkpoint], memory: int | None, tell: Callable[[float, str], None]
) -> OpenModel:
    last = chain[-1]
    where = str(last.path)
    recipe = _recipe(last.manifest.recipe, where)
    try:
        source = open_data(recipe, "train", tell)
    except (DataError, FileError, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{where}: the model is built for its training data, which cannot be opened ({reason}); where it is there, "
            "`nestpipe checkpoint export RUN --for-serving --to DIR` writes what opens without it"
        ) from None
    model = _built(recipe, source)
    dense = last.manifest.of("dense")[0]
    assert isinstance(last.path, Path)
    path = last.path / dense.name
    load_model(model, held.read(path, dense.written), str(path))
    rows = rows_of_checkpoint(held, chain, tables_of(model), recipe.train.seed, memory)
    attach_reader(model, rows)
    return OpenModel(model, rows, recipe, source, where, last.manifest.step, last.digest)


def _open_export(directory: Path, memory: int | None) -> OpenModel:
    manifest, digest = read_serving(directory)
    recipe = _recipe(manifest.recipe, str(directory))
    source = ShapedSource(manifest.data, _catalogue(directory, manifest))
    model = _built(recipe, source)
    path = directory / manifest.dense.name
    load_model(model, read_tensors(path, manifest.dense), str(path))
    rows = rows_of_export(directory, manifest, tables_of(model), recipe.train.seed, memory)
    attach_reader(model, rows)
    return OpenModel(model, rows, recipe, source, str(directory), manifest.step, digest)


def open_data(recipe: Recipe, split: str, tell: Callable[[float, str], None] = lambda done, what: None) -> Source:
    """A split of the recipe's data, prepared first where it must be.  "score": as "eval", labels may be missing."""
    prepare = getattr(recipe.data, "prepare", None)
    if prepare is not None:
        prepare(tell)
    if split == "score" and hasattr(recipe.data, "open_to_score"):
        return check_source(recipe.data.open_to_score(recipe.train.seed), recipe.data_kind)
    return check_source(recipe.data.open("eval" if split == "score" else split, recipe.train.seed), recipe.data_kind)


def _catalogue(directory: Path, manifest: ServingManifest) -> np.ndarray | None:
    if not manifest.catalogue:
        return None
    path = directory / manifest.catalogue[0].name
    items = read_arrays(path, manifest.catalogue[0]).get("items")
    if items is None or items.dtype != np.int64 or items.ndim != 1:
        raise CheckpointError(f"{path} must have the items of the catalogue, int64, and nothing else")
    return items


def _recipe(text: str, where: str) -> Recipe:
    if not text:
        raise CheckpointError(f"{where} has no recipe, so its model cannot be built: build it yourself, and use `Rows`")
    try:
        return parse_recipe(text, DATA, MODELS)
    except ValueError as error:
        raise CheckpointError(f"{where}: its recipe cannot be read ({error})") from None


def _built(recipe: Recipe, source: Source) -> nn.Module:
    """The model in evaluation mode.  Leaves torch's random state as it was."""
    if isinstance(recipe.model, NextItemConfig) and recipe.model.logq:
        recipe = replace(recipe, model=replace(recipe.model, logq=False))  # corrects the loss, never a score
    with torch.random.fork_rng(devices=[]):
        model = build_model(recipe, source)
    return model.eval().requires_grad_(False)
