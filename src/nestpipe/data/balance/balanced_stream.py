"""`data.balance = "cost"`: every worker plans the whole global batch from an index of lengths, and builds its own samples only.

A global batch has the samples that fixed batches have: what all data streams hand out at a time (`shares`).  Nothing is sent:
each worker comes to the same plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from nestpipe.data.balance.assign import assign
from nestpipe.data.balance.costs import Cost, CostPlan
from nestpipe.data.balance.loads import Loads
from nestpipe.data.balance.runs import Run, counted_runs
from nestpipe.data.batch import Batch
from nestpipe.data.global_batches import GlobalBatches
from nestpipe.data.pool import Pool, with_pool
from nestpipe.data.position import Position, fraction_done
from nestpipe.data.read_ahead import ReadAhead
from nestpipe.data.shares import shares_of
from nestpipe.data.source import IndexedSource, shard


class BalancedStream(ReadAhead[dict[int, Position]]):
    """One worker's share, by cost, of the global batches of `streams` data streams; None: as many as workers.

    A worker may get no sample of a batch; it still takes part.  `first_batch` is the number of the batch that comes first, for
    costs that change while running.
    """

    def __init__(
        self,
        source: IndexedSource,
        batch_size: int,
        costs: CostPlan,
        *,
        rank: int = 0,
        workers: int = 1,
        streams: int | None = None,
        epochs: int | None = 1,
        positions: dict[int, Position] | None = None,
        first_batch: int = 0,
        read_ahead: int = 4,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        self.source, self.costs = source, costs
        self.streams = workers if streams is None else streams
        self.loads = Loads()
        self._rank, self._workers = rank, workers
        self._batch_size, self._epochs, self._first = batch_size, epochs, first_batch
        self._shares = shares_of(rank, workers, self.streams)
        self._intervals = [shard(source.extent, source.piece, self.streams, number) for number in range(self.streams)]
        self._pool: Pool | None = getattr(source, "pool", None)
        self._global = GlobalBatches(source.extent, source.piece, self.streams, batch_size, epochs)
        at = {number: (positions or {}).get(number, Position()) for number in range(self.streams)}
        super().__init__(at, read_ahead)

    def positions_after(self, batches: int) -> dict[int, Position]:
        """Where each stream goes on after so many batches."""
        return self.position_after(batches)

    def fraction(self) -> float:
        at = self.position
        return min(fraction_done(self._intervals[number], at[number], self._epochs) for number in at)

    def _batches(self, at: dict[int, Position]) -> Iterator[tuple[Batch, dict[int, Position]]]:
        streams = [
            counted_runs(intervals, self._epochs, at[number], self._batch_size)
            for number, intervals in enumerate(self._intervals)
        ]
        handed_out = 0
        while any(runs := [next(stream, None) for stream in streams]):
            cost = self.costs.at(self._first + handed_out, self._closing.is_set)
            if cost is None:
                return
            at = {**at, **{number: run.after for number, run in enumerate(runs) if run is not None}}
            yield self._plan(handed_out, runs, cost), at
            handed_out += 1

    def _plan(self, number: int, runs: Sequence[Run | None], cost: Cost) -> Batch:
        begin = time.perf_counter()
        given = [run for run in runs if run is not None]
        lengths = [self.source.lengths(run.units, run.epoch) for run in given]
        costs = cost.of(np.concatenate(lengths))
        mine = np.flatnonzero(assign(costs, self._workers) == self._rank)
        took = time.perf_counter() - begin
        self.loads.add(number, np.concatenate(lengths)[mine], self._fixed(runs, lengths), took)
        batch = self._build(given, mine)
        batch = replace(batch, costs=torch.from_numpy(costs[mine]))
        return with_pool(batch, self._pool, self._first + number, self._global)

    def _fixed(self, runs: Sequence[Run | None], lengths: Sequence[np.ndarray]) -> np.ndarray:
        """Lengths of what this worker would have had without balance."""
        by_stream = iter(lengths)
        of = [next(by_stream) if run is not None else np.empty(0, np.int64) for run in runs]
        parts = [of[share.stream][slice(*share.bounds(len(of[share.stream])))] for share in self._shares]
        return np.concatenate(parts)

    def _build(self, runs: Sequence[Run], mine: np.ndarray) -> Batch:
        """The samples at the places `mine` of the global batch; streams may be in different epochs."""
        units = np.concatenate([run.units for run in runs])[mine]
        epochs = np.repeat([run.epoch for run in runs], [len(run.units) for run in runs])[mine]
        if not len(mine):
            return self.source.take(units, runs[0].epoch)
        cuts = [0, *(np.flatnonzero(np.diff(epochs)) + 1), len(mine)]
        return Batch.concat([self.source.take(units[a:b], int(epochs[a])) for a, b in pairwise(cuts)])
