"""The sparse stages: route, retrieve, sync, embed, grad, accumulate, update, writeback.

Each method does one stage of one batch.  All state of a batch is in its `BatchContext`; only the tables outlive it.
Sums run in one fixed order (micro-batch, then worker, then place), so every schedule adds in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from nestpipe.comm.exchange import Exchange, Traffic
from nestpipe.comm.world import World
from nestpipe.data.batch import Batch
from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.device.array_pool import ArrayPool
from nestpipe.keys.dedup import intersect_pairs
from nestpipe.keys.index import Found
from nestpipe.keys.window import Window, plan_window, run_of
from nestpipe.nn.lookups import GroupLookups
from nestpipe.sparse.batch_context import BatchContext
from nestpipe.sparse.buffers import Buffers, RowBuffer
from nestpipe.sparse.eviction_state import eviction_state, restore_evictors
from nestpipe.sparse.evictor import Evicted, Evictor
from nestpipe.sparse.routing import NO_DATA, REFUSED, Routes, route
from nestpipe.sparse.staleness import Ledger
from nestpipe.sparse.view import MicroBatchView
from nestpipe.sparse.window_buffer import WindowBuffer, window_bytes
from nestpipe.tables import kernels
from nestpipe.tables.disk.tiered_store import DiskTier
from nestpipe.tables.eviction.horizon import AgreedClock
from nestpipe.tables.store import make_store


class SparseStages:
    """The sparse side of one worker: its shard of every table group, and its exchanges with the other workers."""

    def __init__(
        self,
        world: World,
        lookups: Sequence[GroupLookups],
        seed: int,
        *,
        tier: DiskTier | None = None,
        buffer_limit: int | None = None,
        window_limit: int | None = None,
        buffer_readers: int = 1,
        traffic: Traffic | None = None,
    ) -> None:
        self.world = world
        self.window_limit = window_limit
        """Bytes of windows of the two batches in flight; above it, a batch is deduplicated per micro-batch."""
        self.windows_by_micro = 0
        """Batches of this worker that were deduplicated per micro-batch."""
        self.lookups = list(lookups)
        self.groups = [l.group for l in lookups]
        self.stores = [make_store(group, seed, world.rank, tier) for group in self.groups]
        self.clock = AgreedClock()
        began = time.monotonic()
        self._seconds_before = 0.0
        self.now: Callable[[], float] = lambda: self._seconds_before + time.monotonic() - began
        """Seconds of training.  Only the value on worker 0 matters."""
        self.evictors = [
            Evictor(group, world.size, self.clock) if group.eviction is not None else None for group in self.groups
        ]
        """Per group; None without an eviction policy."""
        self.buffers = Buffers(self.groups, buffer_limit, batches=3 if buffer_readers == 3 else 2)
        self._arrays = ArrayPool()
        self.ledger = Ledger(self.groups) if any(group.stamped for group in self.groups) else None
        self._holders = buffer_readers
        """Releases until a buffer is free: by its own `writeback`, by `sync` of the next batch if that reads it, and by
        `retrieve` of the batch after that if that runs early."""
        self.before_lookup: Callable[[], None] = lambda: None
        """Called before a lookup outside the schedule.  Waits until the last step is in the tables."""
        self.traffic = traffic or Traffic()
        self._route_exchange = Exchange(world, "route", self.traffic)
        self._row_exchange = Exchange(world, "network", self.traffic)
        self._side_exchange = Exchange(world, "metrics")
        """For lookups outside the schedule, which may run while its lanes use the other exchanges."""

    def plan(self, context: BatchContext) -> None:
        """Finds the rows that this worker needs and where each lookup ends, with no message to other workers.

        Errors in this worker's data show here.  The window limit depends on the batch alone, so every schedule
        makes the same plan.
        """
        micros = context.micros
        if not context.has_data:
            context.planned = [_nothing(context.micro_batches, self.world.size)] * len(self.groups)
            context.ends = [np.zeros((0, 0), np.int64)] * len(self.groups)
            return
        plans = [lookups.plan(micros, self.world.size) for lookups in self.lookups]
        if self.window_limit is not None and len(micros) > 1:
            needed = 2 * sum(window_bytes(window, group) for (window, _), group in zip(plans, self.groups))
            if needed > self.window_limit:
                plans = [lookups.plan(micros, self.world.size, by_micro=True) for lookups in self.lookups]
        context.planned, context.ends = [window for window, _ in plans], [ends for _, ends in plans]

    def route(self, context: BatchContext, exchange: Exchange | None = None) -> None:
        """Sends the planned keys to their owners.  Afterwards the context knows whether the data has ended."""
        samples = (
            sum(len(m) for m in context.micros) if context.has_data else NO_DATA if context.refused is None else REFUSED
        )
        terms = sum(m.terms() for m in context.micros)
        exchange = exchange or self._route_exchange
        context.routes = route(context.planned, terms, samples, context.micro_batches, exchange, self.now())
        context.planned = []

    def retrieve(self, context: BatchContext) -> None:
        """Copies rows and state of the batch's owned keys from the store to its buffer, after the sweep if one is due.

        Rows that the previous batch is still changing are left for `sync`.  Rows of the batch before that come from its
        buffer if it may not be written back yet.  Also allocates the batch's gradients, and its windows.
        """
        owned = _routes(context).owned
        context.buffers = self.buffers.take(f"batch {context.number}", [len(plan) for plan in owned], self._holders)
        if context.previous is not None:
            pairs = zip(_routes(context.previous).owned, owned)
            context.shared = [intersect_pairs(old.tables, old.keys, new.tables, new.keys) for old, new in pairs]
        elsewhere = [places for _, places in context.shared] or [np.empty(0, np.int64)] * len(owned)
        if context.two_before is not None:
            elsewhere = [np.concatenate(both) for both in zip(elsewhere, self._copy_from_two_before(context))]
        self.clock.note(context.number, _routes(context).seconds)
        context.found = [self._read(context, g, skip) for g, skip in enumerate(elsewhere)]
        for buffer, (_, places) in zip(context.buffers, context.shared):
            kernels.poison(buffer.values, places)
        if self.ledger is not None:
            self.ledger.poison(context)
        for buffer in context.buffers:
            torch.from_numpy(buffer.grads).zero_()  # twice as fast as numpy's
        self._make_windows(context)

    def _read(self, context: BatchContext, g: int, skip: np.ndarray) -> Found:
        """Reads the rows of one group, except those at `skip`, which come from other batches' buffers."""
        store, plan, buffer, evictor = self.stores[g], _routes(context).owned[g], context.buffers[g], self.evictors[g]
        if evictor is None:
            return store.retrieve(plan.tables, plan.keys, buffer.values, buffer.state, skip)
        before = _routes(context.previous).owned[g] if context.previous is not None else None
        found = evictor.retrieve(store, plan, buffer, skip, context.number, before, _routes(context).seconds)
        if self.ledger is not None:
            context.forgotten.append((g, *evictor.marked_by(store, context.number)))
        return found

    def _copy_from_two_before(self, context: BatchContext) -> list[np.ndarray]:
        """Copies rows of `two_before` that the previous batch does not touch.

        Returns, per group, their places here.
        """
        assert context.two_before is not None
        before, filled = context.two_before, []
        for old, new, theirs, mine, (_, shared) in zip(
            before.buffers, context.buffers, _routes(before).owned, _routes(context).owned, context.shared
        ):
            places, here = intersect_pairs(theirs.tables, theirs.keys, mine.tables, mine.keys)
            changing = np.zeros(len(mine), np.bool_)
            changing[shared] = True
            final = ~changing[here]
            places, here = places[final], here[final]
            _copy_rows(old, places, new, here)
            filled.append(here)
            old.release()
        context.two_before = None
        return filled

    def sync(self, context: BatchContext) -> None:
        """Updates the rows that the previous batch changed.  From here to `update` the rows are frozen."""
        if context.previous is not None:
            for old, new, (places, mine) in zip(context.previous.buffers, context.buffers, context.shared):
                _copy_rows(old, places, new, mine)
                old.release()
            context.previous = None
        if self.ledger is not None:
            self.ledger.forget(context)
            self.ledger.verify(context)

    def _make_windows(self, context: BatchContext) -> None:
        pairs = zip(_routes(context).windows, self.groups)
        context.windows = [WindowBuffer(window, group, self._arrays) for window, group in pairs]

    def embed(self, context: BatchContext, micro: int, exchange: Exchange | None = None) -> None:
        """Sends rows first used in `micro` from the owners' buffers to the requesters' windows."""
        routes, me = _routes(context), self.world.rank
        sends: list[list[torch.Tensor]] = [[] for _ in range(self.world.size)]
        receives: list[list[torch.Tensor]] = [[] for _ in range(self.world.size)]
        for buffer, memory, plan, window in zip(context.buffers, context.windows, routes.owned, routes.windows):
            part = memory.open(micro)
            for peer in range(self.world.size):
                start, stop = window.first_range(micro, peer)
                target = part.rows[start - part.begin : stop - part.begin]
                first, end = run_of(plan.embed_ends, micro, peer)
                if peer != me:
                    receives[peer].append(target)
                    target = torch.from_numpy(
                        self._arrays.take((end - first, buffer.values.shape[1]), buffer.values.dtype)
                    )
                    sends[peer].append(target)
                kernels.gather(buffer.values, plan.embed_rows[first:end], target.numpy())
        (exchange or self._row_exchange).exchange(sends, receives)

    def grad(self, context: BatchContext, micro: int) -> None:
        """Sends the summed gradients of rows last used in `micro` from the requesters' windows to the owners."""
        routes, me = _routes(context), self.world.rank
        sends: list[list[torch.Tensor]] = [[] for _ in range(self.world.size)]
        receives: list[list[torch.Tensor]] = [[] for _ in range(self.world.size)]
        context.arrived[micro] = []
        for memory, plan, window in zip(context.windows, routes.owned, routes.windows):
            part = memory.of(micro)
            begin, stop = run_of(plan.grad_ends, micro, 0)[0], run_of(plan.grad_ends, micro, self.world.size - 1)[1]
            dtype = part.grads.numpy().dtype
            arrived = torch.from_numpy(self._arrays.take((stop - begin, part.grads.shape[1]), dtype))
            for peer in range(self.world.size):
                first, end = run_of(plan.grad_ends, micro, peer)
                target = arrived[first - begin : end - begin]
                start, last = window.last_range(micro, peer)
                if peer != me:
                    receives[peer].append(target)
                    target = torch.from_numpy(self._arrays.take((last - start, part.grads.shape[1]), dtype))
                    sends[peer].append(target)
                order = window.last_order[start:last]
                kernels.gather(part.grads.numpy(), order - part.begin if part.begin else order, target.numpy())
            context.arrived[micro].append(arrived.numpy())
            memory.close(micro)
        self._row_exchange.exchange(sends, receives)

    def accumulate(self, context: BatchContext, micro: int) -> None:
        """Adds the gradients that arrived with `micro` to the owner's sums, worker after worker.

        The last micro-batch also computes their sum of squares, because all workers wait for `agree`, which needs it.
        """
        for buffer, plan, arrived in zip(context.buffers, _routes(context).owned, context.arrived.pop(micro)):
            begin, stop = run_of(plan.grad_ends, micro, 0)[0], run_of(plan.grad_ends, micro, self.world.size - 1)[1]
            kernels.scatter_add(arrived, plan.grad_rows[begin:stop], buffer.grads)
        if micro == context.micro_batches - 1:
            context.row_squares = float(sum(kernels.sum_of_squares(buffer.grads) for buffer in context.buffers))

    def scale(self, context: BatchContext, factor: float) -> None:
        for buffer in context.buffers:
            kernels.scale(buffer.grads, np.array([factor], buffer.grads.dtype))

    def update(self, context: BatchContext, rate: Callable[[int], float]) -> None:
        """Takes one optimizer step on every admitted row of the buffer."""
        for group, buffer, evictor in zip(self.groups, context.buffers, self.evictors):
            lr = group.optimizer.lr * rate(context.number)
            if evictor is None:
                group.optimizer.apply(buffer.values, buffer.state, buffer.grads, lr, context.number + 1)
            else:
                evictor.update(buffer, context.number, lr)
        if self.ledger is not None:
            self.ledger.stamp(context)

    def writeback(self, context: BatchContext) -> None:
        """Writes the buffer's rows and state back to the store.

        New keys get their row here, and evicted keys lose it.
        """
        self.windows_by_micro += any(window.by_micro for window in _routes(context).windows)
        parts = zip(self.stores, context.buffers, _routes(context).owned, context.found, self.evictors)
        for store, buffer, plan, found, evictor in parts:
            if evictor is None:
                store.writeback(plan.tables, plan.keys, buffer.values, buffer.state, found)
            else:
                evictor.writeback(store, plan, buffer, found, context.number)
            buffer.release()

    def drop(self, context: BatchContext) -> None:
        """Drops a failed batch: frees its buffers and those that only it would have read, cancels its sweep."""
        for evictor in self.evictors:
            if evictor is not None:
                evictor.drop(context.number)
        unread = context.two_before.buffers if context.two_before is not None else []
        for buffer in (*context.buffers, *unread):
            buffer.abandon()

    def evicted(self) -> dict[str, int]:
        """Keys evicted so far on this worker, by table; only tables that can lose keys are listed."""
        evictors = [evictor for evictor in self.evictors if evictor is not None and evictor.policy.sweeps]
        return {t.name: int(e.counts[n]) for e in evictors for n, t in enumerate(e.group.tables)}

    def horizons(self) -> list[tuple[int, int]]:
        """What `ttl_minutes` decided so far, as `EvictionPolicy.ttl_horizons` takes it; of the first group with a clock."""
        return next((e.horizons for e in self.evictors if e is not None and e.policy.by_the_clock), [])

    def eviction_state(self, before: int) -> dict[str, Any]:
        """The eviction state after the batches before `before`, for a checkpoint; {} without a policy."""
        return eviction_state(self.evictors, self.clock, self.now(), before)

    def restore_eviction(self, state: dict[str, Any]) -> None:
        """Restores the `eviction_state` of all workers, summed.  ValueError if it does not fit these tables.

        Call it after the rows are restored.
        """
        if self.ledger is not None:
            # Rows of a new process have no stamp; keys that wait get theirs from their usage.
            for g, store in enumerate(self.stores):
                if store.frequencies is not None:
                    tables, keys, slots = store.frequencies.index.items()
                    self.ledger.recall(g, tables, keys, store.frequencies.usage[slots, 1] + 1)
        self._seconds_before = restore_evictors(self.evictors, self.clock, state, self.world.rank == 0)

    def memory(self) -> dict[str, int]:
        """Of this worker, now: rows, and bytes of DRAM of tables (rows, state, index) and of row buffers.

        `heap_index_bytes` is the part that malloc holds: indexes of tables and ledger, which grow with them.
        """
        waiting = [store.frequencies for store in self.stores if store.frequencies is not None]
        indexes = [*(store.index for store in self.stores), *(one.index for one in waiting)]
        memory = {
            "rows": sum(len(store) for store in self.stores),
            "table_bytes": sum(store.nbytes() for store in self.stores),
            "buffer_bytes": self.buffers.bytes,
            "heap_index_bytes": sum(index.heap_nbytes() for index in indexes),
        }
        if waiting:
            memory["waiting_keys"] = sum(len(table) for table in waiting)
        if self.ledger is not None:
            memory["ledger_bytes"] = self.ledger.nbytes()
            memory["heap_index_bytes"] += self.ledger.heap_nbytes()
        return memory

    def figures(self) -> dict[str, Any]:
        """What the summary of a run tells about this worker's tables and buffers."""
        figures: dict[str, Any] = {
            "rows": sum(len(store) for store in self.stores),
            "waiting": sum(len(store.frequencies) for store in self.stores if store.frequencies is not None),
            "buffer_bytes": {"now": self.buffers.bytes, "peak": self.buffers.peak},
            "windows_by_micro": self.windows_by_micro,
            "bytes_sent": self.traffic.bytes_sent,
            "evicted": self.evicted(),
        }
        if self.ledger is not None:
            figures["reads_verified"] = self.ledger.verified
        return figures

    def use_row_exchange(self, exchange: Exchange) -> None:
        """Rows and their gradients travel by another exchange from now on."""
        self._row_exchange = exchange

    def take_evicted(self) -> list[Evicted]:
        """The keys evicted on this worker since the last call.  Until taken, they cost 8 bytes each."""
        return [evicted for evictor in self.evictors if evictor is not None for evicted in evictor.take_evicted()]

    def close(self) -> None:
        """Releases what the stores hold outside DRAM."""
        for store in self.stores:
            store.close()

    def view(self, features: KeyedJaggedTensor) -> MicroBatchView:
        """The current rows of these ids, outside any schedule: a collection's `RowSource`.  All workers call it together."""
        self.before_lookup()
        return MicroBatchView(self.look_up(Batch(features)), 0, trains=False)

    def look_up(self, batch: Batch | None) -> BatchContext:
        """Routes, retrieves and embeds one batch at once, outside any schedule.  All workers call it together."""
        context = BatchContext(-1, [batch] if batch is not None else [], has_data=batch is not None)
        self.plan(context)
        self.route(context, self._side_exchange)
        if not context.ended:
            self._fetch(context)
        return context

    def _fetch(self, context: BatchContext) -> None:
        """Fetches the rows of a routed context outside the schedule; nothing will be written back."""
        owned = _routes(context).owned
        context.buffers = self.buffers.take("a lookup", [len(plan) for plan in owned], holders=1)
        for store, plan, buffer in zip(self.stores, owned, context.buffers):
            store.retrieve(plan.tables, plan.keys, buffer.values, buffer.state)
        self._make_windows(context)
        self.embed(context, 0, self._side_exchange)
        for buffer in context.buffers:
            buffer.release()

    def rows_of(self, table: str, keys: np.ndarray) -> torch.Tensor:
        """Current rows [n, D] of any keys of one table; first values for keys without a row.

        All workers call it together.
        """
        keys = np.asarray(keys)
        if keys.ndim != 1 or not (keys.size == 0 or np.issubdtype(keys.dtype, np.integer)):
            raise ValueError(f"rows takes a 1-D array of integer keys, not {keys.dtype} of shape {keys.shape}")
        group, number = self.place_of(table)
        windows = [_nothing(1, self.world.size) for _ in self.groups]
        windows[group] = plan_window(
            np.ascontiguousarray(keys, np.int64),
            np.array([len(keys)]),
            np.array([number], np.uint16),
            np.zeros(1, np.int32),
            1,
            self.world.size,
        )
        context = BatchContext(-1, has_data=True)
        context.routes = route(windows, 0.0, 0, 1, self._side_exchange)
        self._fetch(context)
        return context.windows[group].of(0).rows[torch.from_numpy(windows[group].inverse).long()]

    def place_of(self, table: str) -> tuple[int, int]:
        """Group and number of a table."""
        for g, group in enumerate(self.groups):
            for number, config in enumerate(group.tables):
                if config.name == table:
                    return g, number
        names = ", ".join(t.name for group in self.groups for t in group.tables)
        raise ValueError(f"no table {table!r} in this model; it has {names}")


def _copy_rows(old: RowBuffer, places: np.ndarray, new: RowBuffer, mine: np.ndarray) -> None:
    kernels.copy_rows(old.values, places, new.values, mine)
    if new.state.shape[1]:
        kernels.copy_rows(old.state, places, new.state, mine)


def _routes(context: BatchContext) -> Routes:
    assert context.routes is not None, f"batch {context.number} has not been routed"
    return context.routes


def _nothing(micros: int, workers: int) -> Window:
    return plan_window(
        np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint16), np.empty(0, np.int32), micros, workers
    )
