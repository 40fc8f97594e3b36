"""Makes this worker's shard of a model's tables, and attaches the model's collections to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from nestpipe.comm.world import World
from nestpipe.nn.collections import Collection, place_lookups
from nestpipe.sparse.stages import SparseStages
from nestpipe.tables.config import TableConfig
from nestpipe.tables.optimizers import SparseOptimizer

Config = TypeVar("Config", bound=TableConfig)


def attach_collections(
    collections: Sequence[Collection[Config]],
    world: World,
    default_optimizer: SparseOptimizer,
    seed: int,
    *,
    stamped: bool = False,
    **settings: Any,
) -> SparseStages:
    """`settings` are those of `SparseStages`.  `stamped`: rows carry the number of the batch that trained them last."""
    lookups, places = place_lookups(collections, default_optimizer, stamped)
    stages = SparseStages(world, lookups, seed, **settings)
    for collection, mine in zip(collections, places):
        collection.attach(stages, mine)
    return stages
