"""Shard groups and replica groups: who owns a row, and who holds a copy of it.

W workers are M groups of I consecutive ranks.  Each group holds all rows, sharded among its I workers, so the rows of a batch
travel inside a group only.  The M owners of one shard, one in each group, are replicas: what one of them knows of a batch's keys
and gradients it tells the others, and they stay bit for bit equal.  With one group there are no replicas.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from nestpipe.comm.members import Members
from nestpipe.comm.world import World
from nestpipe.config.pipeline import HOST
from nestpipe.keys.mixing import owners_of

SHARD_LANES = ("route", "network", "network back", "metrics")
"""Process groups inside a shard group.  `metrics` is for lookups outside the schedule."""
REPLICA_LANES = ("route", "replica", "replica back")
"""Process groups between replicas.  The lane `route` has its own here: a process group has one set of members."""


@dataclass(frozen=True)
class _Part:
    """Some workers of a run."""

    rank: int
    """The number of this worker among them."""
    ranks: Sequence[int]
    """Their ranks in the run, ascending."""
    groups: dict[str, dist.ProcessGroup]
    timeout: float

    @property
    def size(self) -> int:
        return len(self.ranks)

    def run_rank(self, member: int) -> int:
        return self.ranks[member]


@dataclass(frozen=True)
class ShardGroup(_Part):
    """The workers that hold all rows among them.  `rank` is this worker's shard."""

    def owners(self, tables: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """The member that owns each (table, key) pair."""
        found: np.ndarray = owners_of(tables, keys, self.size)
        return found

    def owns(self, tables: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Whether this worker owns each (table, key) pair."""
        return self.owners(tables, keys) == self.rank


@dataclass(frozen=True)
class ReplicaGroup(_Part):
    """The owners of one shard, one in each shard group.  `rank` is the number of this worker's shard group."""

    @property
    def counts(self) -> bool:
        """Whether this worker's rows count where each row counts once: those of the first shard group do."""
        return self.rank == 0


@dataclass(frozen=True)
class Topology:
    """The two groups that this worker belongs to."""

    shard: ShardGroup
    replicas: ReplicaGroup


def one_group(world: World) -> Topology:
    """All workers in one shard group, over the world's own process groups."""
    shard = ShardGroup(world.rank, range(world.size), world.groups, world.timeout)
    return Topology(shard, ReplicaGroup(0, [world.rank], {}, world.timeout))


def split(world: World, size: int) -> Topology:
    """Shard groups of `size` workers.  All workers call it together; the process groups are made once per world and size."""
    if size == world.size:
        return one_group(world)
    if size not in world.topologies:
        first = world.rank - world.rank % size
        mine, others = range(first, first + size), range(world.rank % size, world.size, size)
        world.topologies[size] = Topology(
            ShardGroup(world.rank - first, mine, _open(world, SHARD_LANES, mine), world.timeout),
            ReplicaGroup(first // size, others, _open(world, REPLICA_LANES, others), world.timeout),
        )
    found = world.topologies[size]
    assert isinstance(found, Topology)
    return found


def _open(world: World, lanes: Sequence[str], ranks: Sequence[int]) -> dict[str, dist.ProcessGroup]:
    """Each worker makes groups of its own only, and as many as all others: torch names such groups by how many there are."""
    if len(ranks) == 1:
        return {}
    patience = timedelta(seconds=world.timeout)
    return {lane: dist.new_group(list(ranks), timeout=patience, use_local_synchronization=True) for lane in lanes}


def group_size(wanted: int | str | None, workers: int) -> int:
    """The size of a shard group that `pipeline.group_size` means.  ValueError, with what is possible, if it is not."""
    if wanted is None or workers == 1:
        return workers
    possible = [size for size in range(1, workers + 1) if workers % size == 0]
    choices = f"with {workers} workers it can be {', '.join(map(str, possible))}"
    if wanted == HOST:
        on_host = os.environ.get("LOCAL_WORLD_SIZE", "")
        if not on_host.isdigit():
            raise ValueError(
                f"pipeline.group_size is 'host', but LOCAL_WORLD_SIZE is not set: start workers with torchrun; {choices}"
            )
        if int(on_host) not in possible:
            raise ValueError(f"pipeline.group_size is 'host', but this host has {on_host} workers: {choices}")
        return int(on_host)
    assert isinstance(wanted, int), wanted
    if wanted not in possible:
        raise ValueError(f"pipeline.group_size must divide the number of workers, {wanted} does not: {choices}")
    return wanted


def sent_inside(shard: Members, by_rank: dict[int, int]) -> tuple[int, int]:
    """Bytes by the rank they went to: those to workers of the own shard group, and those to others."""
    mine = {shard.run_rank(member) for member in range(shard.size)}
    inside = sum(sent for rank, sent in by_rank.items() if rank in mine)
    return inside, sum(by_rank.values()) - inside
