"""Walks over all rows of a table, on all workers of a shard group, in ascending order of keys, with bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from nestpipe.comm.exchange import Exchange
from nestpipe.comm.members import Members

Rows = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Keys [n], values [n, D], state [n, S]."""


class ByTable(Protocol):
    """A store that can be walked."""

    def rows_of(self, table: int) -> tuple[np.ndarray, np.ndarray]: ...
    def read(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]: ...


def walk(shard: Members, store: ByTable, number: int, chunk_rows: int = 1 << 16) -> Iterator[Rows]:
    """Yields the rows of table `number` of a store by ascending key on the first worker of the shard group, nothing elsewhere.
    All workers of the group join.

    In every round each worker proposes the key of its `chunk_rows`-th next row.  All send their rows up to the lowest
    of these keys, so no worker sends more than `chunk_rows` rows at a time.
    """
    exchange = Exchange(shard, "metrics")
    keys, slots = store.rows_of(number)
    at = 0
    last = np.iinfo(np.int64).max
    while True:
        reach = int(keys[at + chunk_rows - 1]) if at + chunk_rows <= len(keys) else last
        bound = torch.tensor([reach])
        exchange.all_reduce(bound, dist.ReduceOp.MIN)
        stop = at + int(np.searchsorted(keys[at:], int(bound), side="right"))
        part = slots[at:stop]
        mine = (keys[at:stop], *store.read(part))
        at = stop
        gathered = _gather(exchange, mine)
        if gathered is not None and len(gathered[0]):
            yield gathered
        if int(bound) == last:
            return


def _gather(exchange: Exchange, mine: Rows) -> Rows | None:
    """All workers' rows in order of keys on worker 0, None on other workers."""
    world = exchange.world
    counts = [torch.tensor([len(mine[0])]) for _ in range(world.size)]
    none: list[list[torch.Tensor]] = [[] for _ in range(world.size)]
    first = world.rank == 0
    outgoing = [[counts[0]] if peer == 0 and not first else [] for peer in range(world.size)]
    incoming = [[counts[peer]] if first and peer else [] for peer in range(world.size)]
    exchange.exchange(outgoing, incoming)
    if not first:
        exchange.exchange(
            [[torch.from_numpy(part) for part in mine] if peer == 0 else [] for peer in range(world.size)], none
        )
        return None
    parts: list[Rows] = [mine]
    for peer in range(1, world.size):
        n = int(counts[peer])
        parts.append(tuple(np.empty((n, *part.shape[1:]), part.dtype) for part in mine))  # type: ignore[arg-type]
    exchange.exchange(none, [[torch.from_numpy(a) for a in part] if peer else [] for peer, part in enumerate(parts)])
    keys = np.concatenate([part[0] for part in parts])
    order = np.argsort(keys)
    values = np.concatenate([part[1] for part in parts])[order]
    return keys[order], values, np.concatenate([part[2] for part in parts])[order]
