"""What fixed batches would have cost workers, from the index of lengths alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nestpipe.data.balance.costs import Cost
from nestpipe.data.balance.runs import counted_runs
from nestpipe.data.position import Position
from nestpipe.data.shares import shares_of
from nestpipe.data.source import IndexedSource, shard


def fixed_loads(
    source: IndexedSource, batch_size: int, workers: int, streams: int, epochs: int | None, cost: Cost
) -> Iterator[np.ndarray]:
    """Of every global batch from the start on: the cost of each worker's share of it."""
    intervals = [shard(source.extent, source.piece, streams, number) for number in range(streams)]
    runs = [counted_runs(mine, epochs, Position(), batch_size) for mine in intervals]
    shares = [shares_of(worker, workers, streams) for worker in range(workers)]
    while any(now := [next(stream, None) for stream in runs]):
        costs = [cost.of(source.lengths(run.units, run.epoch)) if run is not None else np.zeros(0) for run in now]
        yield np.array(
            [sum(costs[s.stream][slice(*s.bounds(len(costs[s.stream])))].sum() for s in mine) for mine in shares]
        )
