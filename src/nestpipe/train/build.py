"""From a recipe to what it names: model, optimizers, pipeline, streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import fields

import torch
import torch.distributed as dist
from torch import nn

from nestpipe.comm.exchange import Exchange
from nestpipe.comm.topology import group_size
from nestpipe.comm.world import World
from nestpipe.config.dense import DenseConfig
from nestpipe.config.pipeline import HOST
from nestpipe.config.recipe import Recipe
from nestpipe.config.tables import TablesConfig
from nestpipe.data.own import check_source
from nestpipe.data.source import DataError, Source
from nestpipe.dense.replica import DenseReplica
from nestpipe.device.choice import has_fused_optimizers, named_device
from nestpipe.models.build import build_model
from nestpipe.pipeline import TrainPipeline
from nestpipe.pipeline.workload import deferred_of, workload_of
from nestpipe.schedule.options import Options, resolve
from nestpipe.tables.disk.tiered_store import DiskTier
from nestpipe.tables.optimizers import OPTIMIZERS, SparseOptimizer
from nestpipe.train.initial import read_initial

HEARTBEAT_SECONDS = 0.5
NO_SAMPLES = "the training data has no samples: look at the paths and fractions in the recipe's [data]"


def sparse_optimizer(section: TablesConfig) -> SparseOptimizer:
    """The recipe's optimizer, with the settings that it has: lr, and eps and betas where it knows them."""
    kind = OPTIMIZERS[section.optimizer]
    known = {field.name for field in fields(kind)}
    given = {"lr": section.lr, "eps": section.eps, "betas": section.betas}
    return kind(**{name: value for name, value in given.items() if name in known and value is not None})


def dense_optimizer(section: DenseConfig, model: nn.Module) -> torch.optim.Optimizer | None:
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
    fused = has_fused_optimizers(parameters[0].device)
    return kind(parameters, betas=section.betas, fused=fused, **common, **eps)


def prepare_data(recipe: Recipe, world: World, tell: Callable[[float, str], None] = lambda done, what: None) -> None:
    """Prepares data that must be prepared before it is read, where that is still to be done.  All workers call it together.

    It may take an hour, and longer on one machine than on another.  A worker that died is still noticed by the usual
    deadline.
    """
    prepare = getattr(recipe.data, "prepare", None)
    if prepare is None:
        return
    failed: list[BaseException] = []

    def run() -> None:
        try:
            prepare(tell)
        except BaseException as error:  # handed to the caller's thread
            failed.append(error)

    thread = threading.Thread(target=run, name="nestpipe-prepare", daemon=True)
    thread.start()
    working, alive = True, Exchange(world, "metrics")
    while working:
        thread.join(HEARTBEAT_SECONDS)
        busy = torch.tensor([int(thread.is_alive()), int(bool(failed))])
        alive.all_reduce(busy, dist.ReduceOp.MAX)
        working = bool(busy[0]) and not bool(busy[1])
    if failed:
        raise failed[0]
    if bool(busy[1]):
        raise DataError("another worker could not prepare the data: look at what it said")


def open_source(recipe: Recipe, split: str, world: World) -> Source:
    source = check_source(recipe.data.open(split, recipe.train.seed), recipe.data_kind)
    if split == "train" and source.extent < max(world.size, recipe.train.streams or 1):
        if source.extent == 0:
            raise DataError(NO_SAMPLES)
        samples = f"{source.extent} sample" + "s" * (source.extent > 1)
        few, instead = f"{world.size} workers", f"--workers {source.extent}"
        if source.extent >= world.size:
            few, instead = f"{recipe.train.streams} data streams", f"--set train.streams={source.extent}"
        raise DataError(f"the training data has {samples}, fewer than the {few}: use {instead} or more data")
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
    model = build_model(recipe, source).to(named_device(recipe.train.device))
    torch.manual_seed(recipe.train.seed * 1_000_003 + world.rank)
    pipeline = TrainPipeline(
        model,
        dense_optimizer(recipe.dense, model),
        sparse_optimizer(recipe.tables),
        recipe.pipeline,
        seed=recipe.train.seed,
        clip_norm=recipe.train.clip_norm,
        table_rate=recipe.tables.rates().factor,
        dense_rate=recipe.dense.rates().factor,
        tier=disk_tier(recipe.tables),
        buffer_limit=_bytes(recipe.memory.buffer_limit),
        window_limit=_bytes(recipe.memory.window_limit),
        precision=recipe.train.precision,
        check_staleness=check_staleness,
        trace=trace,
        world=world,
    )
    if not empty:
        read_initial(pipeline, recipe.tables.initial)
    return pipeline


def recipe_options(recipe: Recipe) -> Options:
    """The options of the list that this recipe runs, from its model and its tables' settings; makes no tables."""
    model = build_model(recipe, check_source(recipe.data.open("train", recipe.train.seed), recipe.data_kind))
    deferred = deferred_of(model, recipe.pipeline)
    parameters = deferred.parameters if deferred is not None else []
    dense = DenseReplica(model.named_parameters(), Exchange(World.single(), "dense"), parameters)
    on_disk, clips = recipe.tables.disk_path is not None, recipe.train.clip_norm is not None
    workers = recipe.train.workers
    # On one host there is one group, but who asks for groups of hosts means several.
    wanted = recipe.pipeline.group_size
    several = wanted == HOST or group_size(wanted, workers) < workers
    averages = several and recipe.pipeline.replicas == "average"
    return resolve(
        recipe.pipeline,
        workload_of(
            model, dense, deferred, clips=clips, on_disk=on_disk, replicates=several and not averages, averages=averages
        ),
    )


def disk_tier(section: TablesConfig) -> DiskTier | None:
    return None if section.disk_path is None else DiskTier(section.disk_path, section.dram_rows or 1)


def _bytes(megabytes: float | None) -> int | None:
    return None if megabytes is None else int(megabytes * 2**20)
