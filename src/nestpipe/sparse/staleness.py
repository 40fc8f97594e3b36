"""`--check staleness`: every row carries the number of the batch that trained it last, and every read is verified.

The stamp is one more number of row state, so it moves wherever the state moves: through the store, the disk, the
buffers and `sync`.  The expected stamps are kept separately, in a ledger that knows only which keys each batch touched,
in order.

A schedule that is stale by design computes with what `peek` copied.  Of that, too, each version is verified: it must be the one
before the last, where the batch before has changed the row, and so stale by one batch and never by more.
"""

from __future__ import annotations

import numpy as np

from nestpipe.device.backend import Array
from nestpipe.errors import NestPipeError
from nestpipe.keys.index import HashIndex
from nestpipe.keys.slab import Slab
from nestpipe.sparse.batch_context import BatchContext
from nestpipe.tables.group import TableGroup

UNFILLED = -1
"""The stamp of a row that `sync` has still to fill."""


class StaleRead(NestPipeError, RuntimeError):
    """A batch was about to use a row that is not up to date."""


class Ledger:
    """The batch that last touched each key of this worker, in the order in which batches reach `sync`."""

    def __init__(self, groups: list[TableGroup]) -> None:
        self._groups = groups
        self._index = [HashIndex() for _ in groups]
        self._last = [Slab(np.int64, ()) for _ in groups]
        self._before_last = [Slab(np.int64, ()) for _ in groups]
        """The stamps that `stamp` replaced last."""
        self.verified = 0
        """Number of reads verified so far."""

    def verify(self, context: BatchContext) -> None:
        """Called when a batch's rows are frozen.

        Each must be as the last batch that touched it left it, else StaleRead.
        """
        assert context.routes is not None
        for g, (group, buffer, plan) in enumerate(zip(self._groups, context.buffers, context.routes.owned)):
            slots = self._index[g].insert(plan.keys, plan.tables)
            expected = self._last[g].rows[slots]
            found = _host(buffer.state[:, -1]).astype(np.int64)
            wrong = np.flatnonzero(found != expected)
            if len(wrong):
                i = wrong[0]
                raise StaleRead(
                    f"batch {context.number} was about to read row {plan.keys[i]} of table "
                    f"{group.tables[plan.tables[i]].name!r} as {_left_by(int(found[i]))}, but it must be as "
                    f"{_left_by(int(expected[i]))} ({len(wrong)} stale rows)"
                )
            self.verified += len(slots)

    def forget(self, context: BatchContext) -> None:
        """Called before `verify`: keys evicted with this batch start again."""
        for group, tables, keys in context.forgotten:
            slots = self._index[group].find(keys, tables)
            self._last[group].rows[slots[slots >= 0]] = 0

    def poison(self, context: BatchContext, with_two_before: bool = False) -> None:
        """Called by `retrieve`: invalidates the stamps of rows that `sync` (or `peek`) has still to fill."""
        for buffer, lists in zip(context.buffers, context.lists):
            stamps = buffer.state[:, -1]
            for places in (lists.shared[1], lists.two_before[1]) if with_two_before else (lists.shared[1],):
                if isinstance(stamps, np.ndarray):
                    stamps[places] = UNFILLED
                else:
                    stamps.index_fill_(0, places, UNFILLED)

    def note_peek(self, context: BatchContext) -> None:
        """Called by `peek`: notes the versions of what it copied, before `update` of the batch before may change them."""
        if context.shared:
            newer = context.previous is None
            buffers = context.buffers if context.previous is None else context.previous.buffers
            context.peeked_stamps = [
                _host(buffer.state[:, -1])[pair[newer]].astype(np.int64)
                for buffer, pair in zip(buffers, context.shared)
            ]

    def verify_peek(self, context: BatchContext) -> int:
        """Called by `update`: how many of the rows that this batch has computed with were one batch stale.

        All that the batch before has changed must be, none by more, else StaleRead; and none after a checkpoint.
        """
        assert context.routes is not None
        stale = 0
        parts = zip(self._groups, context.shared, context.peeked_stamps, context.routes.owned)
        for g, (group, (_, here), found, plan) in enumerate(parts):
            slots = self._index[g].insert(plan.keys[here], plan.tables[here])
            last, before = self._last[g].rows[slots], self._before_last[g].rows[slots]
            wanted = last if context.refreshed else before
            wrong = np.flatnonzero((found != wanted) | (last != context.number))
            if len(wrong):
                i = wrong[0]
                raise StaleRead(
                    f"batch {context.number} has read row {plan.keys[here[i]]} of table "
                    f"{group.tables[plan.tables[here[i]]].name!r} as {_left_by(int(found[i]))}, but it must read it as "
                    f"{_left_by(int(wanted[i]))} ({len(wrong)} such rows)"
                )
            stale += int((found != last).sum())
        return stale

    def stamp(self, context: BatchContext) -> None:
        """Called by `update`: stamps the batch's rows.  A batch that fails before that leaves no trace."""
        assert context.routes is not None
        for g, (buffer, plan) in enumerate(zip(context.buffers, context.routes.owned)):
            buffer.state[:, -1] = context.number + 1
            slots = self._index[g].insert(plan.keys, plan.tables)
            self._before_last[g].rows[slots] = self._last[g].rows[slots]
            self._last[g].rows[slots] = context.number + 1

    def recall(self, group: int, tables: np.ndarray, keys: np.ndarray, stamps: np.ndarray) -> None:
        """Restores the stamps that an earlier process left with these keys."""
        self._last[group].rows[self._index[group].insert(keys, tables)] = stamps

    def nbytes(self) -> int:
        return sum(index.nbytes() + 16 * index.slots_used for index in self._index)

    def heap_nbytes(self) -> int:
        return sum(index.heap_nbytes() for index in self._index)


def _left_by(stamp: int) -> str:
    if stamp == UNFILLED:
        return "retrieve left it for sync"
    return f"batch {stamp - 1} left it" if stamp else "it was initialized"


def _host(stamps: Array) -> np.ndarray:
    """To verify stamps, the host waits for a device: a check has its price."""
    return stamps if isinstance(stamps, np.ndarray) else stamps.cpu().numpy()
