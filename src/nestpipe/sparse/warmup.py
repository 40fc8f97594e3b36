"""Warm-up: compiles or loads from numba's cache every sparse kernel, so that no step waits for a compiler."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nestpipe.comm.exchange import Exchange
from nestpipe.comm.world import World
from nestpipe.config.eviction import EvictionPolicy
from nestpipe.data.kernels import take_samples
from nestpipe.device.host import HostDevice
from nestpipe.keys.dedup import intersect_pairs
from nestpipe.keys.window import plan_window
from nestpipe.ops import pooling_kernels
from nestpipe.ops import rows_kernels as kernels
from nestpipe.sparse.buffers import BufferPool
from nestpipe.sparse.evictor import Evictor
from nestpipe.sparse.routing import OwnerPlan, route
from nestpipe.tables.disk.tiered_store import DiskTier, warm_up_disk
from nestpipe.tables.eviction.horizon import AgreedClock
from nestpipe.tables.eviction.sweep import Sweep
from nestpipe.tables.group import TableGroup
from nestpipe.tables.store import RowStore, make_store


def compile_kernels(groups: list[TableGroup], tier: DiskTier | None = None) -> None:
    """Calls each kernel on one key with the types that these groups use.  It does not touch the tables of the run."""
    key, table, one = np.zeros(1, np.int64), np.zeros(1, np.uint16), np.ones(1, np.int64)
    take_samples(key, np.array([0, 1]), key, 1)
    window = plan_window(key, one, table, np.zeros(1, np.int32), 1, 1)
    owned = route([window], 1.0, 1, 1, Exchange(World.single(), "route")).owned[0]
    intersect_pairs(table, key, table, key)
    for dtype in (np.float32, np.float64):  # of the dense gradients
        kernels.sum_of_squares(np.zeros((1, 1), dtype))
    kinds = {(group.dtype, type(group.optimizer), group.eviction is None): group for group in groups}
    for group in kinds.values():
        scratch = RowStore(group, seed=0)
        values = np.zeros((1, group.dim), group.dtype)
        state = np.zeros((1, group.state_width), group.dtype)
        found = scratch.retrieve(owned.tables, owned.keys, values, state)
        scratch.writeback(owned.tables, owned.keys, values, state, found)
        scratch.retrieve(owned.tables, owned.keys, values, state)
        scratch.rows_of(0)
        if group.eviction is not None:
            _warm_up_eviction(group, owned, tier)
        if tier is not None:
            warm_up_disk(group, tier)
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


def _warm_up_eviction(group: TableGroup, plan: OwnerPlan, tier: DiskTier | None) -> None:
    """Compiles the kernels of admission and eviction.  `plan`: one key of table 0."""
    for admit_after in (1, 2):
        strict = replace(group, eviction=EvictionPolicy(admit_after, ttl_steps=1, sweep_every=1))
        store = make_store(strict, 0, 0, None if tier is None else replace(tier, dram_rows=1))
        evictor = Evictor(strict, 1, AgreedClock())
        for batch in (0, 3):  # at 3 the key is evicted, with or without a row, and starts again
            buffer = BufferPool(strict, HostDevice()).take(len(plan), 1)
            buffer.grads.fill(0)
            found = evictor.retrieve(store, plan, (buffer.values, buffer.state), None, batch, None, 0.0)
            evictor.update(buffer, batch, 0.0)
            evictor.writeback(store, plan, (buffer.values, buffer.state), found, batch)
        sweep = Sweep(store.index, store.usage, np.zeros(store.index.slots_used, np.uint8), 9, len(group.tables))
        sweep.choose_rare(np.ones(len(group.tables), np.int64))
        store.close()
