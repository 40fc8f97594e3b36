"""Compiles (or loads from numba's cache) every kernel of the sparse path, so that no step ever waits for a compiler."""

from __future__ import annotations

import numpy as np

from nestpipe.comm.exchange import Exchange
from nestpipe.comm.world import World
from nestpipe.data.kernels import take_samples
from nestpipe.keys.dedup import intersect_pairs
from nestpipe.keys.window import plan_window
from nestpipe.ops import pooling_kernels
from nestpipe.sparse.eviction_warmup import rehearse_life
from nestpipe.sparse.routing import route
from nestpipe.tables import kernels
from nestpipe.tables.disk.tiered_store import DiskTier, rehearse
from nestpipe.tables.group import TableGroup
from nestpipe.tables.store import RowStore


def compile_kernels(groups: list[TableGroup], tier: DiskTier | None = None) -> None:
    """Calls each kernel on one key in the types that these groups will use.  The tables of the run are not touched."""
    key, table, one = np.zeros(1, np.int64), np.zeros(1, np.uint16), np.ones(1, np.int64)
    take_samples(key, np.array([0, 1]), key, 1)
    window = plan_window(key, one, table, np.zeros(1, np.int32), 1, 1)
    owned = route([window], 1.0, 1, 1, Exchange(World.single(), "route")).owned[0]
    intersect_pairs(table, key, table, key)
    for dtype in (np.float32, np.float64):  # of the dense gradients
        kernels.sum_of_squares(np.zeros((1, 1), dtype))
    kinds = {(group.dtype, type(group.optimizer), group.life is None): group for group in groups}
    for group in kinds.values():
        scratch = RowStore(group, seed=0)
        values = np.zeros((1, group.dim), group.dtype)
        state = np.zeros((1, group.state_width), group.dtype)
        found = scratch.retrieve(owned.tables, owned.keys, values, state)
        scratch.writeback(owned.tables, owned.keys, values, state, found)
        scratch.retrieve(owned.tables, owned.keys, values, state)
        scratch.rows_of(0)
        if group.life is not None:
            rehearse_life(group, owned, tier)
        if tier is not None:
            rehearse(group, tier)
        kernels.gather(values, owned.embed_rows, values.copy())
        kernels.copy_rows(values, key, values.copy(), key)
        kernels.poison(values.copy(), key)
        kernels.scatter_add(values, owned.grad_rows, values.copy())
        kernels.sum_of_squares(values)
        kernels.scale(values, np.ones(1, group.dtype))
        group.optimizer.apply(values, state, values.copy(), 0.0, 1)
        for weights in (np.empty(0, group.dtype), np.ones(1, group.dtype)):
            means, column = np.zeros(1, np.bool_), np.zeros(1, np.int64)
            pooling_kernels.compact(window.inverse, np.full(1, -1, np.int32))
            flat = values.reshape(-1)
            pooling_kernels.pool(values, window.inverse, one, weights, means, column, flat.copy(), group.dim)
            pooling_kernels.pool_backward(
                flat, group.dim, window.inverse, one, weights, means, column, values.copy(), np.ones(1, group.dtype)
            )
