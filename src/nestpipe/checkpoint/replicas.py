"""Compares replicas: the owners of one shard in different groups must hold the same rows, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from nestpipe.checkpoint.manifest import Group
from nestpipe.checkpoint.saved_rows import SavedRows, saved_rows_of
from nestpipe.checkpoint.train_state import TrainState
from nestpipe.comm.exchange import Exchange
from nestpipe.comm.topology import Topology, one_group
from nestpipe.errors import NestPipeError
from nestpipe.tables.row_digest import add_digests, row_digest
from nestpipe.tables.snapshot import Rows

CHUNK = 1 << 16


class ReplicasDiffer(NestPipeError, RuntimeError):
    """Two owners of the same rows hold different ones.  The message is one line, and the same on every worker."""


def topology_of(state: TrainState) -> Topology:
    """The groups of a train state.  One that knows nothing of groups is one group."""
    found = getattr(state, "topology", None)
    return found if isinstance(found, Topology) else one_group(state.world)


def compare_replicas(state: TrainState, when: str, lane: str = "metrics") -> None:
    """ReplicasDiffer, on all workers, unless all replicas hold the same rows.  Reads all of them.  All workers call it together.

    `lane` has the patience for it: others may take as long as a disk does.
    """
    topology = topology_of(state)
    if topology.replicas.size > 1:
        saved = saved_rows_of(state)
        compare_digests(topology, Exchange(state.world, lane), saved, [_digest_of(rows) for rows in saved], when)


def compare_digests(
    topology: Topology, exchange: Exchange, saved: Sequence[SavedRows], digests: Sequence[int], when: str
) -> None:
    """As `compare_replicas`, given the digest of what each worker holds.  `exchange` is with all workers."""
    world, size = exchange.world, topology.shard.size
    everyone = torch.zeros((world.size, len(digests)), dtype=torch.int64)
    everyone[world.rank] = torch.from_numpy(np.array(digests, np.uint64).view(np.int64))
    exchange.all_reduce(everyone)  # others add 0
    for number, rows in enumerate(saved):
        for shard in range(size):
            for rank in range(shard + size, world.size, size):
                if everyone[rank, number] != everyone[shard, number]:
                    raise ReplicasDiffer(
                        f"replicas differ {when}: ranks {shard} and {rank}, which both own shard {shard} of {size}, hold "
                        f"different {_name(rows.group)}; resume from the last checkpoint, at which they were the same, and "
                        "look for machines with other CPUs, other versions or bad memory"
                    )


def _digest_of(rows: SavedRows) -> int:
    tables, keys, slots = rows.index.items()
    parts = (slice(at, at + CHUNK) for at in range(0, len(slots), CHUNK))
    return add_digests(*(row_digest(Rows(tables[p], keys[p], *rows.read(slots[p]))) for p in parts))


def _name(group: Group) -> str:
    tables = ", ".join(group.tables[:3]) + (", ..." if len(group.tables) > 3 else "")
    what = "counts of keys that wait in" if group.waiting else "rows of"
    return f"{what} table{'s' * (len(group.tables) > 1)} {tables}"
