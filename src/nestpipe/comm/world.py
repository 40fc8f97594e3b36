"""The workers of a run: the rank of this one, and a process group for every lane that communicates.

Only one thread issues calls on a process group: gloo mixes up the messages of two threads that share one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

LANE_GROUPS = ("route", "network", "network back", "dense", "dense back", "metrics", "checkpoint")
"""`network back` carries messages to lower ranks: gloo's thread spins if a connection is written and read at the same
time. `dense back` does the same for two workers; more workers sum by gloo's ring.

`checkpoint` is for workers that have written their part and wait for the others, which may take as long as a disk
does."""
DISK_SECONDS = 3600.0


@dataclass(frozen=True)
class World:
    """`groups` has a process group for every lane that communicates.  It is empty for a single worker."""

    rank: int
    size: int
    groups: dict[str, dist.ProcessGroup]
    timeout: float
    spare: dict[tuple[str, int], list[dict[str, dist.ProcessGroup]]] = field(default_factory=dict)
    """By type of device and size of shard groups: groups whose pipeline was closed, for the next one.  A communicator is
    costly to make."""
    topologies: dict[int, Any] = field(default_factory=dict)
    """By size: shard and replica groups that were made (`comm.topology.split`)."""

    def run_rank(self, member: int) -> int:
        """The rank in the run of one of the workers: its own number."""
        return member

    @staticmethod
    def single() -> World:
        return World(0, 1, {}, 300.0)

    @staticmethod
    def join(timeout: float = 300.0) -> World:
        """Joins the launch that torchrun's environment describes, or is a single worker if there is none.

        Uses the default process group if it exists, so a user may call `init_process_group` first.
        """
        if not dist.is_initialized():
            if int(os.environ.get("WORLD_SIZE", "1")) == 1:
                return World(0, 1, {}, timeout)
            dist.init_process_group(os.environ.get("NESTPIPE_BACKEND", "gloo"), timeout=timedelta(seconds=timeout))
        if dist.get_world_size() == 1:
            return World(0, 1, {}, timeout)
        patience = {"checkpoint": max(timeout, DISK_SECONDS)}
        groups = {
            lane: dist.new_group(timeout=timedelta(seconds=patience.get(lane, timeout)))
            for lane in LANE_GROUPS
            if lane != "dense back" or dist.get_world_size() == 2
        }
        return World(dist.get_rank(), dist.get_world_size(), groups, timeout)

    def leave(self) -> None:
        """Ends all process groups without waiting for other workers."""
        if dist.is_initialized():
            dist.destroy_process_group()
