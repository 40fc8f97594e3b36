"""The workers of a run: who this one is, and one process group per lane that talks.

A process group is used by one issuing thread only: gloo mixes up messages of two threads that share one.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

LANE_GROUPS = ("route", "network", "network back", "dense", "dense back", "metrics", "checkpoint")
"""`network back` carries what goes to a lower rank: gloo's thread spins where one connection is written and read at a time.
`dense back` does where there are two workers; more sum by gloo's ring.

`checkpoint` is for workers that have written their part and wait for the others: as long as a disk may take."""
DISK_SECONDS = 3600.0


@dataclass(frozen=True)
class World:
    """`groups` has a process group per talking lane; it is empty for a single worker, which never talks."""

    rank: int
    size: int
    groups: dict[str, dist.ProcessGroup]
    timeout: float

    @staticmethod
    def single() -> World:
        return World(0, 1, {}, 300.0)

    @staticmethod
    def join(timeout: float = 300.0) -> World:
        """Joins the launch that torchrun's environment describes (a single worker where there is none).

        Uses the default process group where it exists already, so that a user's own `init_process_group` counts.
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
        """Ends all process groups; waits for nobody."""
        if dist.is_initialized():
            dist.destroy_process_group()
