"""Replica groups of every size on clusters of many sizes: which size is best, and what it costs in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from nestpipe.sim.figures import Settings, run
from nestpipe.sim.profile import Profile
from nestpipe.sim.systems import SYSTEMS

AXIS = "group"
"""What `--sweep` calls it."""
WORKERS = (128, 512, 1536, 5120, 10240)
SMALLEST = 8
"""Workers of the smallest group: a host's."""
ABOUT = 1.001
"""Steps that differ by less are equally fast."""
GROUPED = tuple(name for name, system in SYSTEMS.items() if system.grouped and system.pipelined)


def sizes(workers: int) -> list[int]:
    """Group sizes to try: each twice the one before, a half to a fifth of all workers, and all, where they divide."""
    found, size = {workers // groups for groups in range(1, 6) if workers % groups == 0}, SMALLEST
    while size < workers:
        found |= {size} if workers % size == 0 else set()
        size *= 2
    return sorted(size for size in found if size >= min(SMALLEST, workers))


def group_sweep(
    profile: Profile,
    workers: Sequence[int],
    settings: Settings,
    systems: Sequence[str] = GROUPED,
    tell: Callable[[float, str], None] = lambda *_: None,
) -> list[dict[str, Any]]:
    """A row per cluster, system and group size; `best` marks the fastest of a cluster and system.

    `table_share`: the part of all tables that a worker holds.  `copies`: how many times as much as in one group.
    """
    rows: list[dict[str, Any]] = []
    for number, count in enumerate(workers):
        for system in systems:
            tell(number / len(workers), f"{count:,} workers, {system}")
            these = []
            for size in sizes(count):
                one = run(SYSTEMS[system], profile, count, replace(settings, group_size=size))
                memory = {"table_share": 1 / size, "copies": count // size}
                these.append({"axis": AXIS, **vars(one), "qps": one.qps, **memory, "best": False})
            # Of about equally fast ones the largest group: it needs the least memory.
            fastest = min(row["step_ms"] for row in these)
            next(row for row in reversed(these) if row["step_ms"] <= ABOUT * fastest)["best"] = True
            rows += these
    return rows
