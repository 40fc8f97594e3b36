"""A worker's training batches, as a recipe asks for them: fixed, filled to a token budget, or balanced by cost."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from torch import nn

from nestpipe.comm.consistency import check_consistent
from nestpipe.comm.world import World
from nestpipe.config.recipe import Recipe
from nestpipe.data.balance.balanced_stream import BalancedStream
from nestpipe.data.balance.costs import Cost, CostFrom, CostPlan, read_costs
from nestpipe.data.balance.keys import BalanceKeys
from nestpipe.data.pool import TargetPool
from nestpipe.data.shares import SharedStream
from nestpipe.data.source import DataError, IndexedSource, Source, is_indexed
from nestpipe.data.stream import Position

TrainStream = SharedStream | BalancedStream


def balance_of(recipe: Recipe) -> str:
    """The recipe's `data.balance`; "none" where its kind of data does not have the key."""
    return recipe.data.balance if isinstance(recipe.data, BalanceKeys) else "none"


def train_stream(
    recipe: Recipe,
    source: Source,
    world: World,
    streams: int | None = None,
    positions: dict[int, Position] | None = None,
    costs: CostPlan | None = None,
    first_batch: int = 0,
) -> TrainStream:
    """This worker's batches; of a run that goes on, from `positions` of as many `streams` as it began with.

    `costs`: for data.balance = "cost".  `first_batch`: the number of its first batch, counted from the start of the run.  All
    workers call it together.
    """
    section, balance = recipe.train, balance_of(recipe)
    streams = section.streams if streams is None else streams
    epochs = section.epochs if section.epochs or section.steps else 1
    rank, workers = world.rank, world.size
    if balance == "none":
        return SharedStream(
            source,
            section.batch_size,
            rank=rank,
            workers=workers,
            streams=streams,
            epochs=epochs,
            positions=positions,
            first=first_batch,
        )
    if not is_indexed(source):
        raise DataError(
            f"data.balance = {balance!r} needs the length of every sample, which data.kind {recipe.data_kind!r} does not give: "
            "leave it out, or let the source have lengths, take and mean_length"
        )
    entries = costs.entries if costs is not None else ()
    check_consistent(world, balance_costs=list(entries), lengths_of_histories=_digest(source))
    if balance == "tokens":
        if isinstance(getattr(source, "pool", None), TargetPool):
            raise DataError(
                "data.sampling = 'in-batch' needs batches that every worker knows, which data.balance = 'tokens' has not: use "
                "data.balance = 'cost', or data.sampling = 'popularity'"
            )
        return SharedStream(
            source,
            section.batch_size,
            rank=rank,
            workers=workers,
            streams=streams,
            epochs=epochs,
            positions=positions,
            first=first_batch,
            token_budget=recipe.data.token_budget or max(1, round(section.batch_size * source.mean_length)),
        )
    assert costs is not None
    return BalancedStream(
        source,
        section.batch_size,
        costs,
        rank=rank,
        workers=workers,
        streams=streams,
        epochs=epochs,
        positions=positions,
        first_batch=first_batch,
    )


def cost_plan(
    recipe: Recipe, model: nn.Module, *, fitted: bool, saved: Sequence[CostFrom] = (), began: int = 0
) -> CostPlan | None:
    """The costs that the recipe's batches are planned with; None where nothing is balanced.

    `fitted`: the caller fits costs while running.  `saved`: those of a run that goes on after step `began`.
    """
    if balance_of(recipe) == "none":
        return None
    if recipe.data.balance_costs is not None:
        return CostPlan(saved or read_costs(recipe.data.balance_costs))
    every = recipe.data.balance_every if fitted else None
    return CostPlan(saved or [start_cost(model)], every, began)


def start_cost(model: nn.Module) -> CostFrom:
    """The cost before anything is measured: by FLOPs, where the model has `history_flops() -> (a, b, c)`; else the usual one."""
    flops = getattr(model, "history_flops", None)
    if not callable(flops):
        usual = Cost()
        return CostFrom(0, usual.a, usual.b, usual.c, "default")
    a, b, c = (float(value) for value in flops())
    return CostFrom(0, a, b, c, "flops")


def _digest(source: IndexedSource) -> str:
    """Of all lengths: workers that see others would come to other plans."""
    lengths = source.lengths(np.arange(source.extent), 0)
    return hashlib.sha256(np.ascontiguousarray(lengths, "<i8").tobytes()).hexdigest()
