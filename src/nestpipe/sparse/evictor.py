"""Admission and eviction in the stages of one table group on one worker.

`update` counts sightings and trains only rows that are admitted, `writeback` gives only these a row.  Counts are part of a row's
state, so they go wherever that goes, and each batch finds what the batch before has left, under every schedule.

A sweep is chosen in `retrieve` of its batch, from what is known alike under every schedule: the store as the last batch but one
has left it, and which keys the last one touches.  The last one's own rows may or may not be in the store by then: they are never
chosen, and counted as they will be.  From then on batches do not see what was chosen.  It is removed in `writeback` of the same
batch, so that a batch that was prepared and never trained evicts nothing.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass

import numpy as np

from nestpipe.keys.index import Found
from nestpipe.keys.slab import Slab
from nestpipe.sparse.buffers import RowBuffer
from nestpipe.sparse.routing import OwnerPlan
from nestpipe.tables.eviction import kernels as kernels
from nestpipe.tables.eviction.horizon import AgreedClock
from nestpipe.tables.eviction.policy import MOST_SIGHTINGS
from nestpipe.tables.eviction.sweep import Sweep
from nestpipe.tables.group import TableGroup
from nestpipe.tables.keyed import KeyedRows


@dataclass(frozen=True)
class Evicted:
    """Keys of a table that a sweep has removed, on one worker, ascending."""

    batch: int
    table: str
    keys: np.ndarray


@dataclass(frozen=True)
class _Condemned:
    """What a sweep has chosen: slots of rows, and of sightings of keys without a row."""

    rows: np.ndarray
    waiting: np.ndarray


class Evictor:
    """Of one group on one worker.  `retrieve` and `writeback` may come from different threads."""

    def __init__(self, group: TableGroup, workers: int, clock: AgreedClock) -> None:
        assert group.life is not None
        self.group, self.life = group, group.life
        self._share = self.life.share(workers)
        self._clock = clock
        self._row_marks, self._waiting_marks = Slab(np.uint8, ()), Slab(np.uint8, ())
        self._condemned: dict[int, _Condemned] = {}
        """By batch: chosen, and not removed yet."""
        self._lock = threading.Lock()
        self.counts = np.zeros(len(group.tables), np.int64)
        """Keys evicted so far, by number of the table."""
        self.forgotten = 0
        """Keys that never got a row and of which not even the sightings are known any more."""
        self.horizons: list[tuple[int, int]] = []
        """Sweeps by the clock: from batch (first) on, keys went that were last touched before batch (second)."""
        self._evicted: list[Evicted] = []

    def retrieve(
        self,
        store: KeyedRows,
        plan: OwnerPlan,
        buffer: RowBuffer,
        skip: np.ndarray | None,
        batch: int,
        previous: OwnerPlan | None,
        seconds: float,
    ) -> Found:
        """As the store's; before it the sweep, where one is due.  `previous`: of the batch before, unless it is in the store."""
        due = self.life.sweep_is_due(batch)
        with self._lock if due or self._condemned else contextlib.nullcontext():
            if due:
                self._sweep(store, batch, previous, self._horizon(batch, seconds))
            found = store.retrieve(plan.tables, plan.keys, buffer.values, buffer.state, skip)
            if self._condemned:
                self._hide(store, plan, buffer, found)
        return found

    def update(self, buffer: RowBuffer, batch: int, lr: float) -> None:
        """Counts the batch as a sighting of all its rows, then one optimizer step on those that are admitted."""
        waiting = np.empty(len(buffer.state), np.int64)
        life = self.group.life_in(buffer.state)
        waiting = waiting[: kernels.sight(life, batch, MOST_SIGHTINGS, self.life.admit_after, waiting)]
        values, state = buffer.values[waiting], buffer.state[waiting]
        self.group.optimizer.apply(buffer.values, buffer.state, buffer.grads, lr, batch + 1)
        buffer.values[waiting], buffer.state[waiting] = values, state

    def writeback(self, store: KeyedRows, plan: OwnerPlan, buffer: RowBuffer, found: Found, batch: int) -> None:
        """What this batch's sweep has chosen goes; then as the store's, for rows that are admitted."""
        with self._lock:
            self._remove(store, batch)
            if store.sightings is None:
                store.writeback(plan.tables, plan.keys, buffer.values, buffer.state, found)
                return
            life = self.group.life_in(buffer.state)
            waits = life[:, 0] < self.life.admit_after
            if not waits.any():
                store.writeback(plan.tables, plan.keys, buffer.values, buffer.state, found)
            else:
                rows, waiting = np.flatnonzero(~waits), np.flatnonzero(waits)
                found = Found(found.slots[rows], found.deletions)
                store.writeback(plan.tables[rows], plan.keys[rows], buffer.values[rows], buffer.state[rows], found)
                store.sightings.put(plan.tables[waiting], plan.keys[waiting], life[waiting])
            admitted = np.flatnonzero(life[:, 0] == self.life.admit_after)  # by this very batch
            store.sightings.remove(plan.tables[admitted], plan.keys[admitted])

    def drop(self, batch: int) -> None:
        """The batch will not be trained: what its sweep has chosen stays."""
        with self._lock:
            condemned = self._condemned.pop(batch, None)
            if condemned is not None:
                self._row_marks.rows[condemned.rows] = 0
                self._waiting_marks.rows[condemned.waiting] = 0

    def take_evicted(self) -> list[Evicted]:
        """What was evicted since the last call."""
        with self._lock:
            taken, self._evicted = self._evicted, []
        return taken

    def condemned_by(self, store: KeyedRows, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Tables and keys that the sweep of a batch has chosen, with a row or without."""
        condemned = self._condemned.get(batch)
        if condemned is None:
            return np.empty(0, np.uint16), np.empty(0, np.int64)
        parts = [(store.index, condemned.rows)]
        if store.sightings is not None:
            parts.append((store.sightings.index, condemned.waiting))
        tables = np.concatenate([index.slot_tables.rows[slots] for index, slots in parts])
        return tables, np.concatenate([index.slot_keys.rows[slots] for index, slots in parts])

    def _horizon(self, batch: int, seconds: float) -> int:
        """Keys that were last touched before this batch are too old for the sweep of `batch`."""
        horizon = 0 if self.life.ttl_steps is None else batch - self.life.ttl_steps
        if self.life.by_the_clock:
            assert self.life.ttl_minutes is not None
            if self.horizons and self.horizons[-1][0] == batch:  # it is tried again
                self.horizons.pop()
            known = self.horizons[-1][1] if self.horizons else 0
            by_clock = max(known, self._clock.horizon(seconds, 60 * self.life.ttl_minutes))
            if by_clock > known:
                self.horizons.append((batch, by_clock))
        else:
            by_clock = self.life.given_horizon(batch)
        return max(horizon, by_clock)

    def _sweep(self, store: KeyedRows, batch: int, previous: OwnerPlan | None, horizon: int) -> None:
        """Chooses; the lock is held.  A sweep that is tried again chooses the same again."""
        tables = len(self.group.tables)
        sweep = Sweep(store.index, store.life, self._row_marks.rows, batch - 1, tables)
        coming = np.zeros(tables, np.int64)
        if previous is not None:
            without = sweep.spare(previous.tables, previous.keys)
            coming = self._coming(store, batch, previous.tables[without], previous.keys[without])
        rows = sweep.choose_aged(horizon)
        if self._share is not None:
            sweep.choose_rare(rows + coming - self._share)
        waiting = np.empty(0, np.int64)
        if store.sightings is not None and horizon > 0:
            of_waiting = Sweep(store.sightings.index, store.sightings.life, self._waiting_marks.rows, batch - 1, tables)
            if previous is not None:
                of_waiting.spare(previous.tables, previous.keys)
            of_waiting.choose_aged(horizon)
            waiting = of_waiting.condemn()
        self._condemned[batch] = _Condemned(sweep.condemn(), waiting)

    def _coming(self, store: KeyedRows, batch: int, tables: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """How many of these keys of the batch before, which have no row, that batch will give one; per table."""
        if store.sightings is not None:
            slots = store.sightings.index.find(keys, tables)
            known = (slots >= 0) & (self._waiting_marks.rows[slots] & kernels.CONDEMNED == 0)
            life = store.sightings.life[slots]
            seen = np.where(known, life[:, 0], 0)
            # where the count is that batch's own already, it is in the store, and gave none
            comes = (seen + 1 >= self.life.admit_after) & ~(known & (life[:, 1] == batch - 1))
            tables = tables[comes]
        return np.bincount(tables, minlength=len(self.group.tables))

    def _hide(self, store: KeyedRows, plan: OwnerPlan, buffer: RowBuffer, found: Found) -> None:
        """Keys that are condemned are read as if they were gone."""
        marks = self._row_marks.rows
        gone = np.flatnonzero((found.slots >= 0) & (marks[found.slots] & kernels.CONDEMNED != 0))
        found.slots[gone] = -1
        store.begin(gone, plan.tables, plan.keys, buffer.values, buffer.state)
        if store.sightings is not None:
            none = np.flatnonzero(found.slots < 0)
            slots = store.sightings.index.find(plan.keys[none], plan.tables[none])
            forgotten = (slots >= 0) & (self._waiting_marks.rows[slots] & kernels.CONDEMNED != 0)
            buffer.state[none[forgotten]] = 0

    def _remove(self, store: KeyedRows, batch: int) -> None:
        condemned = self._condemned.get(batch)
        if condemned is None:
            return
        if len(condemned.rows):
            tables = store.index.slot_tables.rows[condemned.rows]
            keys = store.index.slot_keys.rows[condemned.rows]
            store.remove(tables, keys)
            self._row_marks.rows[condemned.rows] = 0
            self._note(batch, tables, keys)
        if len(condemned.waiting):
            assert store.sightings is not None
            index = store.sightings.index
            store.sightings.remove(index.slot_tables.rows[condemned.waiting], index.slot_keys.rows[condemned.waiting])
            self._waiting_marks.rows[condemned.waiting] = 0
            self.forgotten += len(condemned.waiting)
        del self._condemned[batch]  # last: whoever finds nothing condemned need not take the lock

    def _note(self, batch: int, tables: np.ndarray, keys: np.ndarray) -> None:
        counts = np.bincount(tables, minlength=len(self.group.tables))
        self.counts += counts
        for number in np.flatnonzero(counts).tolist():
            self._evicted.append(Evicted(batch, self.group.tables[number].name, np.sort(keys[tables == number])))
