"""Admission and eviction in the stages of one table group on one worker.

`update` counts key use and trains only admitted rows; `writeback` stores only these.  Usage is part of a row's state,
so it moves with the row, and every batch finds what the batch before it left, under every schedule.

`retrieve` of a batch runs its sweep.  The sweep uses only what is the same under every schedule: the store as the last
batch but one left it, and the keys of the last batch.  The rows of the last batch may or may not be in the store yet,
so they are never chosen, and they are counted as if they were there.  Chosen keys are marked, and later batches do not
see them.  `writeback` of the same batch removes them, so a batch that was prepared but never trained evicts nothing.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nestpipe.config.eviction import MAX_FREQUENCY
from nestpipe.keys.index import Found
from nestpipe.keys.slab import Slab
from nestpipe.ops import row_steps
from nestpipe.sparse.buffers import RowBuffer
from nestpipe.sparse.routing import OwnerPlan
from nestpipe.tables.eviction import kernels as kernels
from nestpipe.tables.eviction.horizon import AgreedClock
from nestpipe.tables.eviction.sweep import Sweep
from nestpipe.tables.group import TableGroup
from nestpipe.tables.keyed import KeyedRows
from nestpipe.tables.snapshot import Values


@dataclass(frozen=True)
class Evicted:
    """Keys of a table that a sweep removed on one worker, ascending."""

    batch: int
    table: str
    keys: np.ndarray


@dataclass(frozen=True)
class _Marked:
    """What a sweep marked: slots of rows, and slots of the frequency table for keys without a row."""

    rows: np.ndarray
    waiting: np.ndarray


class Evictor:
    """Applies the eviction policy of one group on one worker.

    `retrieve` and `writeback` may run on different threads.
    """

    def __init__(self, group: TableGroup, workers: int, clock: AgreedClock) -> None:
        assert group.eviction is not None
        self.group, self.policy = group, group.eviction
        self._share = self.policy.share(workers)
        self._clock = clock
        self._row_flags, self._waiting_flags = Slab(np.uint8, ()), Slab(np.uint8, ())
        self._marked: dict[int, _Marked] = {}
        """By batch: marked and not removed yet."""
        self._lock = threading.Lock()
        self.counts = np.zeros(len(group.tables), np.int64)
        """Keys evicted so far, by table number."""
        self.forgotten = 0
        """Keys evicted before they got a row; not even their frequency is kept."""
        self.horizons: list[tuple[int, int]] = []
        """Decisions of the clock, (sweep, batch): from that sweep on, keys last touched before that batch went."""
        self._evicted: list[Evicted] = []

    def retrieve(
        self,
        store: KeyedRows,
        plan: OwnerPlan,
        into: Values,
        skip: np.ndarray | None,
        batch: int,
        previous: OwnerPlan | None,
        seconds: float,
    ) -> Found:
        """Sweeps if a sweep is due, then retrieves as the store does.

        `previous`: the plan of the batch before, or None if that batch is in the store.
        """
        due = self.policy.sweep_is_due(batch)
        with self._lock if due or self._marked else contextlib.nullcontext():
            if due:
                self._sweep(store, batch, previous, self._horizon(batch, seconds))
            found = store.retrieve(plan.tables, plan.keys, *into, skip)
            if self._marked:
                self._hide(store, plan, into, found)
        return found

    def update(self, buffer: RowBuffer, batch: int, lr: float) -> None:
        """Counts the batch as a use of all its rows, then takes one optimizer step on the admitted ones."""
        usage = self.group.eviction_columns(buffer.state)
        if not isinstance(buffer.state, np.ndarray):
            self._update_on_device(buffer, usage, batch, lr)
            return
        waiting = np.empty(len(buffer.state), np.int64)
        waiting = waiting[: kernels.count_use(usage, batch, MAX_FREQUENCY, self.policy.admit_after, waiting)]
        values, state = buffer.values[waiting], buffer.state[waiting]
        self.group.optimizer.apply(buffer.values, buffer.state, buffer.grads, lr, batch + 1)
        buffer.values[waiting], buffer.state[waiting] = values, state

    def _update_on_device(self, buffer: RowBuffer, usage: Tensor, batch: int, lr: float) -> None:
        """How many rows wait is known on the device only: all take the step, and those that wait take it back."""
        usage[:, 0].add_(1).clamp_(max=MAX_FREQUENCY)
        usage[:, 1].fill_(batch)
        waits = usage[:, 0] < self.policy.admit_after
        before = buffer.values.clone(), buffer.state.clone()
        self.group.optimizer.apply(buffer.values, buffer.state, buffer.grads, lr, batch + 1)
        row_steps.keep_rows(buffer.values, buffer.state, before, waits)

    def writeback(
        self,
        store: KeyedRows,
        plan: OwnerPlan,
        rows: Values,
        found: Found,
        batch: int,
    ) -> None:
        """Removes what this batch's sweep marked, then writes back the admitted rows as the store does."""
        with self._lock:
            self._remove(store, batch)
            values, state = rows
            if store.frequencies is None:
                store.writeback(plan.tables, plan.keys, values, state, found)
                return
            usage = self.group.eviction_columns(state)
            waits = usage[:, 0] < self.policy.admit_after
            if not waits.any():
                store.writeback(plan.tables, plan.keys, values, state, found)
            else:
                stored, waiting = np.flatnonzero(~waits), np.flatnonzero(waits)
                found = Found(found.slots[stored], found.deletions)
                store.writeback(plan.tables[stored], plan.keys[stored], values[stored], state[stored], found)
                store.frequencies.put(plan.tables[waiting], plan.keys[waiting], usage[waiting])
            admitted = np.flatnonzero(usage[:, 0] == self.policy.admit_after)  # by this batch
            store.frequencies.remove(plan.tables[admitted], plan.keys[admitted])

    def drop(self, batch: int) -> None:
        """The batch will not be trained: unmarks what its sweep marked."""
        with self._lock:
            marked = self._marked.pop(batch, None)
            if marked is not None:
                self._row_flags.rows[marked.rows] = 0
                self._waiting_flags.rows[marked.waiting] = 0

    def take_evicted(self) -> list[Evicted]:
        """The keys evicted since the last call."""
        with self._lock:
            taken, self._evicted = self._evicted, []
        return taken

    def marked_by(self, store: KeyedRows, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Tables and keys that the sweep of a batch marked, with or without a row."""
        marked = self._marked.get(batch)
        if marked is None:
            return np.empty(0, np.uint16), np.empty(0, np.int64)
        parts = [(store.index, marked.rows)]
        if store.frequencies is not None:
            parts.append((store.frequencies.index, marked.waiting))
        tables = np.concatenate([index.slot_tables.rows[slots] for index, slots in parts])
        return tables, np.concatenate([index.slot_keys.rows[slots] for index, slots in parts])

    def _horizon(self, batch: int, seconds: float) -> int:
        """The sweep of `batch` evicts keys last touched before the batch that this returns."""
        horizon = 0 if self.policy.ttl_steps is None else batch - self.policy.ttl_steps
        if self.policy.by_the_clock:
            assert self.policy.ttl_minutes is not None
            if self.horizons and self.horizons[-1][0] == batch:  # the batch is being retried
                self.horizons.pop()
            known = self.horizons[-1][1] if self.horizons else 0
            by_clock = max(known, self._clock.horizon(seconds, 60 * self.policy.ttl_minutes))
            if by_clock > known:
                self.horizons.append((batch, by_clock))
        else:
            by_clock = self.policy.given_horizon(batch)
        return max(horizon, by_clock)

    def _sweep(self, store: KeyedRows, batch: int, previous: OwnerPlan | None, horizon: int) -> None:
        """Marks keys to evict; the lock is held.  A repeated sweep marks the same keys."""
        tables = len(self.group.tables)
        sweep = Sweep(store.index, store.usage, self._row_flags.rows, batch - 1, tables)
        coming = np.zeros(tables, np.int64)
        if previous is not None:
            without = sweep.spare(previous.tables, previous.keys)
            coming = self._coming(store, batch, previous.tables[without], previous.keys[without])
        rows = sweep.choose_aged(horizon)
        if self._share is not None:
            sweep.choose_rare(rows + coming - self._share)
        waiting = np.empty(0, np.int64)
        if store.frequencies is not None and horizon > 0:
            frequencies = store.frequencies
            of_waiting = Sweep(frequencies.index, frequencies.usage, self._waiting_flags.rows, batch - 1, tables)
            if previous is not None:
                of_waiting.spare(previous.tables, previous.keys)
            of_waiting.choose_aged(horizon)
            waiting = of_waiting.mark()
        self._marked[batch] = _Marked(sweep.mark(), waiting)

    def _coming(self, store: KeyedRows, batch: int, tables: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Rows per table that the batch before is about to add, given its keys that have no row."""
        if store.frequencies is not None:
            slots = store.frequencies.index.find(keys, tables)
            known = (slots >= 0) & (self._waiting_flags.rows[slots] & kernels.MARKED == 0)
            usage = store.frequencies.usage[slots]
            frequency = np.where(known, usage[:, 0], 0)
            # If the frequency already counts that batch, the batch is in the store and added no row for this key.
            comes = (frequency + 1 >= self.policy.admit_after) & ~(known & (usage[:, 1] == batch - 1))
            tables = tables[comes]
        return np.bincount(tables, minlength=len(self.group.tables))

    def _hide(self, store: KeyedRows, plan: OwnerPlan, into: Values, found: Found) -> None:
        """Makes marked keys read as if they were already removed."""
        flags = self._row_flags.rows
        gone = np.flatnonzero((found.slots >= 0) & (flags[found.slots] & kernels.MARKED != 0))
        found.slots[gone] = -1
        store.begin(gone, plan.tables, plan.keys, *into)
        if store.frequencies is not None:
            none = np.flatnonzero(found.slots < 0)
            slots = store.frequencies.index.find(plan.keys[none], plan.tables[none])
            forgotten = (slots >= 0) & (self._waiting_flags.rows[slots] & kernels.MARKED != 0)
            into[1][none[forgotten]] = 0

    def _remove(self, store: KeyedRows, batch: int) -> None:
        marked = self._marked.get(batch)
        if marked is None:
            return
        if len(marked.rows):
            tables = store.index.slot_tables.rows[marked.rows]
            keys = store.index.slot_keys.rows[marked.rows]
            store.remove(tables, keys)
            self._row_flags.rows[marked.rows] = 0
            self._note(batch, tables, keys)
        if len(marked.waiting):
            assert store.frequencies is not None
            index = store.frequencies.index
            store.frequencies.remove(index.slot_tables.rows[marked.waiting], index.slot_keys.rows[marked.waiting])
            self._waiting_flags.rows[marked.waiting] = 0
            self.forgotten += len(marked.waiting)
        del self._marked[batch]  # last: `retrieve` takes the lock only while something is marked

    def _note(self, batch: int, tables: np.ndarray, keys: np.ndarray) -> None:
        counts = np.bincount(tables, minlength=len(self.group.tables))
        self.counts += counts
        for number in np.flatnonzero(counts).tolist():
            self._evicted.append(Evicted(batch, self.group.tables[number].name, np.sort(keys[tables == number])))
