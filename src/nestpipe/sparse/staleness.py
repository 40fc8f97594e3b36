"""`--check staleness`: every row carries the number of the batch that trained it last, and every read is verified.

The stamp is one more number of row state, so it moves wherever the state moves: through the store, the disk, the
buffers and `sync`.  The expected stamps are kept separately, in a ledger that knows only which keys each batch touched,
in order.
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

    def poison(self, context: BatchContext) -> None:
        """Called by `retrieve`: invalidates the stamps of rows that `sync` has still to fill."""
        for buffer, lists in zip(context.buffers, context.lists):
            stamps, places = buffer.state[:, -1], lists.shared[1]
            if isinstance(stamps, np.ndarray):
                stamps[places] = UNFILLED
            else:
                stamps.index_fill_(0, places, UNFILLED)

    def stamp(self, context: BatchContext) -> None:
        """Called by `update`: stamps the batch's rows.  A batch that fails before that leaves no trace."""
        assert context.routes is not None
        for g, (buffer, plan) in enumerate(zip(context.buffers, context.routes.owned)):
            buffer.state[:, -1] = context.number + 1
            self._last[g].rows[self._index[g].insert(plan.keys, plan.tables)] = context.number + 1

    def recall(self, group: int, tables: np.ndarray, keys: np.ndarray, stamps: np.ndarray) -> None:
        """Restores the stamps that an earlier process left with these keys."""
        self._last[group].rows[self._index[group].insert(keys, tables)] = stamps

    def nbytes(self) -> int:
        return sum(index.nbytes() + 8 * index.slots_used for index in self._index)

    def heap_nbytes(self) -> int:
        return sum(index.heap_nbytes() for index in self._index)


def _left_by(stamp: int) -> str:
    if stamp == UNFILLED:
        return "retrieve left it for sync"
    return f"batch {stamp - 1} left it" if stamp else "it was initialized"


def _host(stamps: Array) -> np.ndarray:
    """To verify stamps, the host waits for a device: a check has its price."""
    return stamps if isinstance(stamps, np.ndarray) else stamps.cpu().numpy()
