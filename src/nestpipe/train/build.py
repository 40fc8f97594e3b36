"""From a recipe to what it names: model, optimizers, pipeline, streams."""

from __future__ import annotations

import torch
from torch import nn

from nestpipe.comm.world import World
from nestpipe.config.recipe import Recipe
from nestpipe.config.sections import DenseSection, TablesSection
from nestpipe.data.shares import SharedStream
from nestpipe.data.source import DataError, Source
from nestpipe.data.stream import Position
from nestpipe.models.kinds import make_model
from nestpipe.pipeline.pipeline import TrainPipeline
from nestpipe.tables.config import TableDefaults
from nestpipe.tables.disk.tiered_store import DiskTier
from nestpipe.tables.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad, SparseOptimizer
from nestpipe.train.initial import read_initial

NO_SAMPLES = "the training data has no samples: look at the paths and fractions in the recipe's [data]"


def sparse_optimizer(section: TablesSection) -> SparseOptimizer:
    eps = {} if section.eps is None else {"eps": section.eps}
    if section.optimizer == "sgd":
        return SGD(section.lr)
    if section.optimizer == "adagrad":
        return Adagrad(section.lr, **eps)
    if section.optimizer == "adam":
        return Adam(section.lr, section.betas, **eps)
    return RowWiseAdagrad(section.lr, **eps)


def dense_optimizer(section: DenseSection, model: nn.Module) -> torch.optim.Optimizer | None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        return None
    common: dict[str, float] = {"lr": section.lr, "weight_decay": section.weight_decay}
    eps = {} if section.eps is None else {"eps": section.eps}
    if section.optimizer == "sgd":
        return torch.optim.SGD(parameters, momentum=section.momentum, **common)
    if section.optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, **common, **eps)
    # fused: one pass over each parameter instead of ten small operations
    kind = torch.optim.AdamW if section.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, betas=section.betas, fused=True, **common, **eps)


def open_source(recipe: Recipe, split: str, world: World) -> Source:
    source: Source = recipe.data.open(split, recipe.train.seed)
    if split == "train" and source.extent < world.size:
        if source.extent == 0:
            raise DataError(NO_SAMPLES)
        samples = f"{source.extent} sample" + "s" * (source.extent > 1)
        raise DataError(
            f"the training data has {samples}, fewer than the {world.size} workers: "
            f"use --workers {source.extent} or more data"
        )
    return source


def make_pipeline(
    recipe: Recipe,
    source: Source,
    world: World,
    *,
    check_staleness: bool = False,
    trace: bool = False,
    empty: bool = False,
) -> TrainPipeline:
    """The model of a recipe, ready to train.  The dense part starts from the seed alone, dropout differs by worker.

    `empty`: without the rows that tables.initial names, since all rows will come from a checkpoint.
    """
    torch.manual_seed(recipe.train.seed)
    tables = TableDefaults(recipe.tables.dtype, recipe.tables.init, recipe.tables.init_scale, recipe.tables.life())
    model = make_model(recipe.model, source, tables)
    if recipe.dense.dtype == "float64":
        model = model.double()
    torch.manual_seed(recipe.train.seed * 1_000_003 + world.rank)
    pipeline = TrainPipeline(
        model,
        dense_optimizer(recipe.dense, model),
        sparse_optimizer(recipe.tables),
        schedule=recipe.pipeline.schedule,
        micro_batches=recipe.pipeline.micro_batches,
        clustering=recipe.pipeline.clustering,
        look_ahead=recipe.pipeline.look_ahead,
        early_prepare=recipe.pipeline.early_prepare,
        early_retrieve=recipe.pipeline.early_retrieve,
        early_reduce=recipe.pipeline.early_reduce,
        early_update=recipe.pipeline.early_update,
        defer_weight_grads=recipe.pipeline.defer_weight_grads,
        seed=recipe.train.seed,
        clip_norm=recipe.train.clip_norm,
        table_rate=recipe.tables.rates().factor,
        dense_rate=recipe.dense.rates().factor,
        tier=None
        if recipe.tables.disk_path is None
        else DiskTier(recipe.tables.disk_path, recipe.tables.dram_rows or 1),
        buffer_limit=_bytes(recipe.memory.buffer_limit),
        window_limit=_bytes(recipe.memory.window_limit),
        check_staleness=check_staleness,
        trace=trace,
        world=world,
    )
    if not empty:
        read_initial(pipeline, recipe.tables.initial)
    return pipeline


def _bytes(megabytes: float | None) -> int | None:
    return None if megabytes is None else int(megabytes * 2**20)


def train_stream(
    recipe: Recipe,
    source: Source,
    world: World,
    streams: int | None = None,
    positions: dict[int, Position] | None = None,
) -> SharedStream:
    """This worker's batches; of a run that goes on, from `positions` of as many `streams` as it began with."""
    section = recipe.train
    epochs = section.epochs if section.epochs or section.steps else 1
    return SharedStream(
        source,
        section.batch_size,
        rank=world.rank,
        workers=world.size,
        streams=streams,
        epochs=epochs,
        positions=positions,
    )
