"""Compiles every kernel of admission and eviction in the types of a group, on tables of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nestpipe.sparse.buffers import BufferPool
from nestpipe.sparse.evictor import Evictor
from nestpipe.sparse.routing import OwnerPlan
from nestpipe.tables.disk.tiered_store import DiskTier
from nestpipe.tables.eviction.horizon import AgreedClock
from nestpipe.tables.eviction.policy import EvictionPolicy
from nestpipe.tables.eviction.sweep import Sweep
from nestpipe.tables.group import TableGroup
from nestpipe.tables.store import make_store


def rehearse_life(group: TableGroup, plan: OwnerPlan, tier: DiskTier | None) -> None:
    """`plan`: of one key, of table 0."""
    for admit_after in (1, 2):
        strict = replace(group, life=EvictionPolicy(admit_after, ttl_steps=1, sweep_every=1))
        store = make_store(strict, 0, 0, None if tier is None else replace(tier, dram_rows=1))
        life = Evictor(strict, 1, AgreedClock())
        for batch in (0, 3):  # where it is evicted, or forgotten, and begins anew
            buffer = BufferPool(strict).take(len(plan), 1)
            buffer.grads.fill(0)
            found = life.retrieve(store, plan, buffer, None, batch, None, 0.0)
            life.update(buffer, batch, 0.0)
            life.writeback(store, plan, buffer, found, batch)
        sweep = Sweep(store.index, store.life, np.zeros(store.index.slots_used, np.uint8), 9, len(group.tables))
        sweep.choose_rare(np.ones(len(group.tables), np.int64))
        store.close()
