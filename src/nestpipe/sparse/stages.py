"""The sparse stages: route, retrieve, peek, sync, embed, grad, accumulate, replicate, update, writeback, average.

Each method does one stage of one batch.  All state of a batch is in its `BatchContext`; only the tables outlive it.
Sums run in one fixed order (micro-batch, then worker, then place), so every schedule adds in the same order.  Sums of shard
groups are added in one fixed order, too (micro-batch, then group), so replicas stay equal.  Where they are averaged instead, each
owner updates rows by its own group's gradients, those of the mean over the group's loss terms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from nestpipe.comm.exchange import Exchange, Shared, Traffic, Transfer
from nestpipe.comm.topology import Topology, one_group, sent_inside
from nestpipe.comm.world import World
from nestpipe.data.batch import Batch
from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.device.backend import Array, Device
from nestpipe.device.host import HostDevice
from nestpipe.device.sim.disjoint import disjoint
from nestpipe.keys.dedup import intersect_pairs
from nestpipe.keys.index import Found
from nestpipe.keys.window import Window, micro_run, plan_window, run_of
from nestpipe.nn.lookups import GroupLookups
from nestpipe.ops import rows
from nestpipe.ops.pooling import WINDOW_GRADS
from nestpipe.sparse.averaging import Averager
from nestpipe.sparse.batch_context import BatchContext, RowLists
from nestpipe.sparse.buffers import Buffers, RowBuffer
from nestpipe.sparse.eviction_state import eviction_state, restore_evictors
from nestpipe.sparse.evictor import Evicted, Evictor
from nestpipe.sparse.routing import NO_DATA, REFUSED, OwnerPlan, Routes, route
from nestpipe.sparse.staleness import Ledger
from nestpipe.sparse.view import MicroBatchView
from nestpipe.sparse.window_buffer import WindowBuffer, window_bytes
from nestpipe.tables.disk.tiered_store import DiskTier
from nestpipe.tables.eviction.horizon import AgreedClock
from nestpipe.tables.optimizers import with_moments
from nestpipe.tables.store import make_store

_NOWHERE = np.empty(0, np.int64)
GROUP_GRADS = (
    "a group's sums are sent in the micro-batch that uses their rows last in the group; later ones add to other rows"
)


class RowExchange(Protocol):
    """How rows and their gradients travel."""

    def exchange_rows(self, transfers: Sequence[Transfer]) -> None: ...


class ReplicaExchange(Protocol):
    """How gradients travel between replicas."""

    def share_rows(self, shared: Sequence[Shared]) -> None: ...


class SparseStages:
    """The sparse side of one worker: its shard of every table group, and its exchanges with the other workers.

    Rows travel inside `shard`, the workers that hold all rows among them; `replicas` own the same rows in other such groups.
    """

    def __init__(
        self,
        world: World,
        lookups: Sequence[GroupLookups],
        seed: int,
        *,
        topology: Topology | None = None,
        device: Device | None = None,
        row_exchange: RowExchange | None = None,
        replica_exchange: ReplicaExchange | None = None,
        tier: DiskTier | None = None,
        buffer_limit: int | None = None,
        window_limit: int | None = None,
        buffer_readers: int = 1,
        peeks: bool = False,
        traffic: Traffic | None = None,
        moment_scale: float | None = None,
    ) -> None:
        """`moment_scale`: replicas are averaged, and row-wise Adagrad has this factor; None: replicas stay equal."""
        self.world = world
        topology = topology or one_group(world)
        self.shard, self.replicas = topology.shard, topology.replicas
        self._averages = self.replicas.size > 1 and moment_scale is not None
        self._replicates = replicated = self.replicas.size > 1 and not self._averages
        self.window_limit = window_limit
        """Bytes of windows of the two batches in flight; above it, a batch is deduplicated per micro-batch."""
        self.windows_by_micro = 0
        """Batches of this worker that were deduplicated per micro-batch."""
        self.lookups = list(lookups)
        self.groups = [l.group for l in lookups]
        scaled = moment_scale if self._averages else None
        self._optimizers = [
            group.optimizer if scaled is None else with_moments(group.optimizer, scaled) for group in self.groups
        ]
        self.stores = [make_store(group, seed, world.rank, tier) for group in self.groups]
        self.clock = AgreedClock()
        began = time.monotonic()
        self._seconds_before = 0.0
        self.now: Callable[[], float] = lambda: self._seconds_before + time.monotonic() - began
        """Seconds of training.  Only the value on worker 0 matters."""
        self.evictors = [
            Evictor(group, self.shard.size, self.clock) if group.eviction is not None else None for group in self.groups
        ]
        """Per group; None without an eviction policy."""
        self._host = HostDevice()
        self.device: Device = device or self._host
        self.peeks = peeks
        """The schedule is stale by design: `embed` sends what `peek` copied."""
        self.row_reads, self.stale_reads = 0, 0
        """Rows of this owner that batches read, each once a batch; of these, one batch stale."""
        batches = max(2, buffer_readers) + (peeks and buffer_readers == 3)
        self.buffers = Buffers(self.groups, buffer_limit, self.device, batches, replicated)
        self._side_buffers = self.buffers if self.device is self._host else Buffers(self.groups, None, self._host)
        """For lookups outside the schedule: the host does them, whatever the device."""
        self.ledger = Ledger(self.groups) if any(group.stamped for group in self.groups) else None
        self._holders = buffer_readers
        """Releases until a buffer is free: by its own `writeback`, by `sync` of the next batch if that reads it, and by
        `retrieve` (or `peek`) of the batch after that if that runs early."""
        self.before_lookup: Callable[[], None] = lambda: None
        """Called before a lookup outside the schedule.  Waits until the last step is in the tables."""
        self.traffic = traffic or Traffic()
        self._route_exchange = Exchange(self.shard, "route", self.traffic)
        self._tell_exchange = Exchange(self.replicas, "route", self.traffic)
        self._row_exchange: RowExchange = row_exchange or Exchange(self.shard, "network", self.traffic)
        self._replica_exchange: ReplicaExchange = replica_exchange or Exchange(self.replicas, "replica", self.traffic)
        self._average_exchange = Exchange(self.replicas, "replica", self.traffic)
        """Between the hosts, whatever the device: rows are averaged in the stores."""
        self._averager = Averager(len(self.groups), self._average_exchange) if self._averages else None
        self._side_exchange = Exchange(self.shard, "metrics")
        """For lookups outside the schedule, which may run while its lanes use the other exchanges."""

    def plan(self, context: BatchContext) -> None:
        """Finds the rows that this worker needs and where each lookup ends, with no message to other workers.

        Errors in this worker's data show here.  The window limit depends on the batch alone, so every schedule
        makes the same plan.
        """
        micros = context.micros
        if not context.has_data:
            context.planned = [_nothing(context.micro_batches, self.shard.size)] * len(self.groups)
            context.ends = [np.zeros((0, 0), np.int64)] * len(self.groups)
            return
        plans = [lookups.plan(micros, self.shard.size) for lookups in self.lookups]
        if self.window_limit is not None and len(micros) > 1:
            needed = 2 * sum(window_bytes(window, group) for (window, _), group in zip(plans, self.groups))
            if needed > self.window_limit:
                plans = [lookups.plan(micros, self.shard.size, by_micro=True) for lookups in self.lookups]
        context.planned, context.ends = [window for window, _ in plans], [ends for _, ends in plans]

    def route(self, context: BatchContext, exchange: Exchange | None = None) -> None:
        """Sends the planned keys to their owners.  Afterwards the context knows whether the data has ended.

        Another `exchange` is for a lookup outside the schedule, which changes no row: it tells the replicas nothing.
        """
        samples = (
            sum(len(m) for m in context.micros) if context.has_data else NO_DATA if context.refused is None else REFUSED
        )
        terms = sum(m.terms() for m in context.micros)
        replicas = self._tell_exchange if exchange is None else None
        exchange = exchange or self._route_exchange
        context.routes = route(
            context.planned,
            terms,
            samples,
            context.micro_batches,
            exchange,
            self.now(),
            replicas,
            union=not self._averages,
        )
        context.planned = []

    def retrieve(self, context: BatchContext) -> None:
        """Copies rows and state of the batch's owned keys from the store to its buffer, after the sweep if one is due.

        Rows that the previous batch is still changing are left for `sync`.  Rows of the batch before that come from its
        buffer if it may not be written back yet.  Also allocates the batch's gradients, and its windows.
        """
        owned = _routes(context).owned
        if context.previous is not None:
            pairs = zip(_routes(context.previous).owned, owned)
            context.shared = [intersect_pairs(old.tables, old.keys, new.tables, new.keys) for old, new in pairs]
        beside = [len(here) for _, here in context.shared] if self.peeks and context.shared else None
        holders = self._holders if context.readers is None else context.readers
        context.buffers = self.buffers.take(f"batch {context.number}", [len(plan) for plan in owned], holders, beside)
        from_two_before = self._rows_two_before(context)
        self._upload_lists(context, from_two_before)
        self.clock.note(context.number, _routes(context).seconds)
        context.found = [self._read(context, g, mine) for g, (_, mine) in enumerate(from_two_before)]
        for buffer, lists in zip(context.buffers, context.lists):
            rows.poison(buffer.values, lists.shared[1])
            if self.peeks:
                rows.poison(buffer.values, lists.two_before[1])
                rows.poison(buffer.outgoing, lists.peeked)
        if self.ledger is not None:
            self.ledger.poison(context, with_two_before=self.peeks)
        for buffer in context.buffers:
            rows.zero(buffer.grads)
            if buffer.group_grads is not buffer.grads:
                rows.zero(buffer.group_grads)
        if not self.peeks:
            self._copy_from_two_before(context)
            self._make_windows(context)

    def _upload_lists(self, context: BatchContext, from_two_before: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Brings the places of rows to where the row operations of all stages can read them."""
        routes, none = _routes(context), (_NOWHERE, _NOWHERE)
        shared = context.shared or [none] * len(self.groups)
        arrays = [
            array
            for plan, window, pair, old in zip(routes.owned, routes.windows, shared, from_two_before)
            for array in (
                *self._outgoing(plan, pair[1]),
                plan.grad_rows,
                window.last_order,
                window.inverse,
                *pair,
                *old,
                _replica_rows(plan),
            )
        ]
        there = self.device.upload(arrays, "network", "replica", "update", "compute")
        context.lists = [_lists(there[at : at + 10]) for at in range(0, len(there), 10)]

    def _outgoing(self, plan: OwnerPlan, shared: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places that `embed` sends from, and those beside the rows to which `peek` copies `shared`."""
        if not self.peeks or not len(shared):
            return plan.embed_rows, _NOWHERE
        beside = np.arange(len(plan), len(plan) + len(shared))
        places = np.arange(len(plan))
        places[shared] = beside
        return places[plan.embed_rows].astype(plan.embed_rows.dtype), beside

    def _read(self, context: BatchContext, g: int, from_two_before: np.ndarray) -> Found:
        """Reads the rows of one group from the store, except those that come from other batches' buffers."""
        store, plan, buffer, evictor = self.stores[g], _routes(context).owned[g], context.buffers[g], self.evictors[g]
        skip = context.shared[g][1] if context.shared else _NOWHERE
        if len(from_two_before):
            skip = np.concatenate([skip, from_two_before])
        staged = self.device.stage([buffer.values, buffer.state])
        values, state = staged.arrays
        if evictor is None:
            found = store.retrieve(plan.tables, plan.keys, values, state, skip)
        else:
            before = _routes(context.previous).owned[g] if context.previous is not None else None
            found = evictor.retrieve(
                store, plan, (values, state), skip, context.number, before, _routes(context).seconds
            )
            if self.ledger is not None:
                context.forgotten.append((g, *evictor.marked_by(store, context.number)))
        self.device.send_up(staged, [buffer.values, buffer.state])
        return found

    def _rows_two_before(self, context: BatchContext) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per group: places of the rows of `two_before` that the previous batch does not touch, in its buffer and here."""
        if context.two_before is None:
            return [(_NOWHERE, _NOWHERE)] * len(self.groups)
        found = []
        for theirs, mine, (_, shared) in zip(_routes(context.two_before).owned, _routes(context).owned, context.shared):
            places, here = intersect_pairs(theirs.tables, theirs.keys, mine.tables, mine.keys)
            changing = np.zeros(len(mine), np.bool_)
            changing[shared] = True
            final = ~changing[here]
            found.append((places[final], here[final]))
        return found

    def _copy_from_two_before(self, context: BatchContext) -> None:
        if context.two_before is not None:
            for old, new, lists in zip(context.two_before.buffers, context.buffers, context.lists):
                _copy_rows(old, new, lists.two_before)
                old.release()
            context.two_before = None

    def peek(self, context: BatchContext) -> None:
        """Copies values of the rows that the previous batch is about to change, beside this batch's: `embed` sends these.

        Once `sync` has run, the batch's own rows are newer: then it copies them.
        """
        self._copy_from_two_before(context)
        previous = context.previous
        for g, (buffer, lists) in enumerate(zip(context.buffers, context.lists)):
            if previous is not None:
                rows.copy_rows(previous.buffers[g].values, lists.shared[0], buffer.outgoing, lists.peeked)
            else:
                rows.copy_rows(buffer.values, lists.shared[1], buffer.outgoing, lists.peeked)
        if self.ledger is not None:
            self.ledger.note_peek(context)
        if not context.windows:
            self._make_windows(context)  # here, so that windows of two batches exist at a time

    def sync(self, context: BatchContext) -> None:
        """Updates the rows that the previous batch changed.  From here to `update` the rows are frozen."""
        if context.previous is not None:
            for old, new, lists in zip(context.previous.buffers, context.buffers, context.lists):
                _copy_rows(old, new, lists.shared)
                old.release()
            context.previous = None
        if self.ledger is not None:
            self.ledger.forget(context)
            self.ledger.verify(context)

    def _make_windows(self, context: BatchContext) -> None:
        pairs = zip(_routes(context).windows, self.groups)
        context.windows = [WindowBuffer(window, group, self.device) for window, group in pairs]

    def embed(self, context: BatchContext, micro: int) -> None:
        """Sends rows first used in `micro` from the owners' buffers to the requesters' windows."""
        self._embed(context, micro, self.device, self._row_exchange)

    def _embed(self, context: BatchContext, micro: int, device: Device, exchange: RowExchange) -> None:
        routes, transfers = _routes(context), []
        for buffer, memory, plan, window, lists in zip(
            context.buffers, context.windows, routes.owned, routes.windows, context.lists
        ):
            part = memory.open(micro)
            start, stop = micro_run(window.first_ends, micro)
            first, end = micro_run(plan.embed_ends, micro)
            arriving = part.rows[start - part.begin : stop - part.begin]
            leaving = self._leaving(arriving, end - first, buffer, device)
            rows.gather(buffer.outgoing, lists.embed_rows[first:end], leaving)
            transfers.append(Transfer(leaving, arriving, plan.embed_sizes[micro], window.first_sizes[micro]))
        if self.shard.size > 1:
            exchange.exchange_rows(transfers)

    def _leaving(self, arriving: Array, count: int, buffer: RowBuffer, device: Device) -> Array:
        """Memory for rows that are to be sent.  A single worker has nothing to send: they are gathered where they go."""
        if self.shard.size == 1:
            return arriving
        return device.empty((count, buffer.group.dim), buffer.group.dtype)

    def grad(self, context: BatchContext, micro: int) -> None:
        """Sends the summed gradients of rows last used in `micro` from the requesters' windows to the owners."""
        routes, transfers = _routes(context), []
        for buffer, memory, plan, window, lists in zip(
            context.buffers, context.windows, routes.owned, routes.windows, context.lists
        ):
            part = memory.of(micro)
            start, stop = micro_run(window.last_ends, micro)
            first, end = micro_run(plan.grad_ends, micro)
            arriving = self.device.empty((end - first, buffer.group.dim), buffer.group.dtype, "update")
            leaving = self._leaving(arriving, stop - start, buffer, self.device)
            order = lists.last_order[start:stop]
            with disjoint(WINDOW_GRADS):
                rows.gather(part.grads, order - part.begin if part.begin else order, leaving)
            transfers.append(Transfer(leaving, arriving, window.last_sizes[micro], plan.grad_sizes[micro]))
            memory.close(micro)
        if self.shard.size > 1:
            self._row_exchange.exchange_rows(transfers)
        context.arrived[micro] = [transfer.receive for transfer in transfers]

    def accumulate(self, context: BatchContext, micro: int) -> None:
        """Adds the gradients that arrived with `micro` to the owner's sums, worker after worker."""
        arrived, plans = context.arrived.pop(micro), _routes(context).owned
        for buffer, plan, gradients, lists in zip(context.buffers, plans, arrived, context.lists):
            first, end = micro_run(plan.grad_ends, micro)
            if self._averages:
                rows.scale(gradients, _group_share(context))
            with disjoint(GROUP_GRADS):
                rows.add_rows(gradients, lists.grad_rows[first:end], buffer.group_grads)
        if not self._replicates:
            self._sum_squares(context, micro)

    def replicate(self, context: BatchContext, micro: int) -> None:
        """Sends the group's sums of rows that it uses last in `micro` to the replicas, and adds those of all groups, group after
        group, whichever came first.
        """
        routes, shared = _routes(context), []
        for buffer, plan, lists in zip(context.buffers, routes.owned, context.lists):
            assert plan.replicas is not None
            first, end = micro_run(plan.replicas.ends, micro)
            start, stop = run_of(plan.replicas.ends, micro, self.replicas.rank)
            sums = self.device.empty((end - first, buffer.group.dim), buffer.group.dtype)
            with disjoint(GROUP_GRADS):
                rows.gather(buffer.group_grads, lists.replica_rows[start:stop], sums[start - first : stop - first])
            shared.append(Shared(sums, plan.replicas.sizes[micro]))
        self._replica_exchange.share_rows(shared)
        for buffer, plan, lists, one in zip(context.buffers, routes.owned, context.lists, shared):
            assert plan.replicas is not None
            first, end = micro_run(plan.replicas.ends, micro)
            rows.add_rows(one.rows, lists.replica_rows[first:end], buffer.grads)
        self._sum_squares(context, micro)

    def _sum_squares(self, context: BatchContext, micro: int) -> None:
        """After the last micro-batch, because all workers wait for `agree`, which needs it.  Of replicas one counts.

        Those that are averaged have gradients of their own: the mean of their squares counts.
        """
        if micro == context.micro_batches - 1 and self._averages:
            context.row_squares = [rows.sum_of_squares(b.grads) / self.replicas.size for b in context.buffers]
        elif micro == context.micro_batches - 1:
            counts = self.replicas.counts
            context.row_squares = [rows.sum_of_squares(b.grads) if counts else 0.0 for b in context.buffers]

    def scale(self, context: BatchContext, factor: float) -> None:
        for buffer in context.buffers:
            rows.scale(buffer.grads, factor)

    def update(self, context: BatchContext, rate: Callable[[int], float]) -> None:
        """Takes one optimizer step on every admitted row of the buffer."""
        if self.peeks:
            self._count_reads(context)
        for optimizer, buffer, evictor in zip(self._optimizers, context.buffers, self.evictors):
            lr = optimizer.lr * rate(context.number)
            if evictor is None:
                optimizer.apply(buffer.values, buffer.state, buffer.grads, lr, context.number + 1)
            else:
                evictor.update(buffer, context.number, lr)
        if self.ledger is not None:
            self.ledger.stamp(context)

    def _count_reads(self, context: BatchContext) -> None:
        self.row_reads += sum(len(buffer.values) for buffer in context.buffers)
        if self.ledger is not None:
            self.stale_reads += self.ledger.verify_peek(context)
        elif not context.refreshed:
            self.stale_reads += sum(len(here) for _, here in context.shared)

    def writeback(self, context: BatchContext) -> None:
        """Writes the buffer's rows and state back to the store.

        New keys get their row here, and evicted keys lose it.
        """
        self.windows_by_micro += any(window.by_micro for window in _routes(context).windows)
        down = self.device.bring_down([array for buffer in context.buffers for array in (buffer.values, buffer.state)])
        parts = zip(self.stores, context.buffers, _routes(context).owned, context.found, self.evictors)
        for g, (store, buffer, plan, found, evictor) in enumerate(parts):
            values, state = down.arrays[2 * g : 2 * g + 2]
            if evictor is None:
                store.writeback(plan.tables, plan.keys, values, state, found)
            else:
                evictor.writeback(store, plan, (values, state), found, context.number)
            if self._averager is not None:
                self._averager.changed[g].note(plan.tables, plan.keys)
            buffer.release()
        self.device.give_back(down)

    def average(self) -> None:
        """Gives all replicas the mean of their rows and optimizer state.  Nobody else may use the stores meanwhile."""
        assert self._averager is not None
        self._averager.average(self.stores)

    def forget_rows(self, context: BatchContext) -> None:
        """Undoes what stages after `route` did with a batch that was prepared and not trained."""
        for buffer in context.buffers:
            buffer.abandon()
        context.buffers, context.found, context.lists, context.windows, context.shared = [], [], [], [], []

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
            **({"device": of_device} if (of_device := self.device.figures()) else {}),
            "windows_by_micro": self.windows_by_micro,
            "bytes_sent": self.traffic.bytes_sent,
            **self._between_groups(),
            "evicted": self.evicted(),
        }
        if self.ledger is not None:
            figures["reads_verified"] = self.ledger.verified
        if self.peeks:
            figures["row_reads"] = {"all": self.row_reads, "one_batch_stale": self.stale_reads}
        return figures

    def _between_groups(self) -> dict[str, Any]:
        """With replicas: the size of a shard group, how many there are, and what of `bytes_sent` went to the own one."""
        if self.replicas.size == 1:
            return {}
        inside, between = sent_inside(self.shard, self.traffic.by_rank())
        sent = {"bytes_sent_inside_group": inside, "bytes_sent_to_other_groups": between}
        found: dict[str, Any] = {"group_size": self.shard.size, "groups": self.replicas.size, **sent}
        if self._averager is not None:
            to_replicas = sum(self.traffic.by_rank("replica").values())
            averaged = {"averages": self._averager.averages, "rows_averaged": self._averager.rows}
            found |= {**averaged, "bytes_sent_in_averages": to_replicas}
        return found

    def use_row_exchange(self, exchange: RowExchange, between: ReplicaExchange) -> None:
        """Rows and their gradients travel by other exchanges from now on: inside the shard group, and between replicas."""
        self._row_exchange, self._replica_exchange = exchange, between

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
        context = self.look_up(Batch(features))
        context.moved = [Batch(features)]
        return MicroBatchView(context, 0, False, self.device)

    def look_up(self, batch: Batch | None) -> BatchContext:
        """Routes, retrieves and embeds one batch at once, outside any schedule.  All workers call it together."""
        context = BatchContext(-1, [batch] if batch is not None else [], has_data=batch is not None)
        self.plan(context)
        self.route(context, self._side_exchange)
        if not context.ended:
            self._fetch(context)
            self._move_lookup(context)
        return context

    def _move_lookup(self, context: BatchContext) -> None:
        """What was looked up goes to where the model is."""
        inverses = self.device.upload([lists.inverse for lists in context.lists])
        context.lists = [replace(lists, inverse=inverse) for lists, inverse in zip(context.lists, inverses)]
        for window in context.windows:
            window.move(self.device)

    def _fetch(self, context: BatchContext) -> None:
        """Fetches the rows of a routed context outside the schedule; nothing will be written back."""
        routes, host = _routes(context), self._host
        context.buffers = self._side_buffers.take("a lookup", [len(plan) for plan in routes.owned], holders=1)
        for store, plan, buffer in zip(self.stores, routes.owned, context.buffers):
            store.retrieve(plan.tables, plan.keys, buffer.values, buffer.state)
        none = (_NOWHERE, _NOWHERE)
        context.lists = [
            RowLists(plan.embed_rows, plan.grad_rows, window.last_order, window.inverse, none, none, _NOWHERE)
            for plan, window in zip(routes.owned, routes.windows)
        ]
        context.windows = [WindowBuffer(window, group, host) for window, group in zip(routes.windows, self.groups)]
        self._embed(context, 0, host, self._side_exchange)
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
        windows = [_nothing(1, self.shard.size) for _ in self.groups]
        windows[group] = plan_window(
            np.ascontiguousarray(keys, np.int64),
            np.array([len(keys)]),
            np.array([number], np.uint16),
            np.zeros(1, np.int32),
            1,
            self.shard.size,
        )
        context = BatchContext(-1, has_data=True)
        context.routes = route(windows, 0.0, 0, 1, self._side_exchange)
        self._fetch(context)
        return context.windows[group].of(0).row_tensor[torch.from_numpy(windows[group].inverse).long()]

    def place_of(self, table: str) -> tuple[int, int]:
        """Group and number of a table."""
        for g, group in enumerate(self.groups):
            for number, config in enumerate(group.tables):
                if config.name == table:
                    return g, number
        names = ", ".join(t.name for group in self.groups for t in group.tables)
        raise ValueError(f"no table {table!r} in this model; it has {names}")


def _lists(of: Sequence[Array]) -> RowLists:
    return RowLists(of[0], of[2], of[3], of[4], (of[5], of[6]), (of[7], of[8]), of[9], of[1])


def _replica_rows(plan: OwnerPlan) -> np.ndarray:
    return _NOWHERE if plan.replicas is None else plan.replicas.rows


def _group_share(context: BatchContext) -> float:
    """From a gradient of the mean over all loss terms to that of the mean over the own group's."""
    routes = _routes(context)
    return routes.terms / routes.group_terms if routes.group_terms else 1.0


def _copy_rows(old: RowBuffer, new: RowBuffer, places: tuple[Array, Array]) -> None:
    """`places`: in the old buffer, and in the new one."""
    rows.copy_rows(old.values, places[0], new.values, places[1])
    if new.state.shape[1]:
        rows.copy_rows(old.state, places[0], new.state, places[1])


def _routes(context: BatchContext) -> Routes:
    assert context.routes is not None, f"batch {context.number} has not been routed"
    return context.routes


def _nothing(micros: int, workers: int) -> Window:
    return plan_window(
        np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint16), np.empty(0, np.int32), micros, workers
    )
