"""The systems to compare: each is a schedule and a topology, without any number of its own."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

from nestpipe.schedule import Builder, Options, build, build_by, dbp, fwp, nested, serial
from nestpipe.schedule.action import Action
from nestpipe.schedule.check import Violation, examine
from nestpipe.schedule.options import DEFAULT


def stale(step: int, micro_batches: int, start: int = 0, options: Options = DEFAULT) -> list[Action]:
    """A common prefetcher: `dbp` without the copy of rows that the last batch has changed since they were read.

    Rows of the next batch leave after the dense step, whether they are updated or not.  `check` refuses it.
    """
    following = [a for a in dbp(step, micro_batches, start, options) if a.batch == step + 1 and a.stage == "embed"]
    issued = [
        replace(action, waits=tuple(wait for wait in action.waits if wait[0] != "sync" or wait[1] == start))
        for action in dbp(step, micro_batches, start, options)
        if action not in following and (action.stage != "sync" or action.batch == start)
    ]
    waits = (("retrieve", step + 1, -1), ("step", step, -1))
    return [*issued, *(replace(action, waits=waits) for action in following)]


@dataclass(frozen=True)
class System:
    name: str
    title: str
    builder: Builder
    pipelined: bool
    """Has the profile's number of micro-batches; otherwise one."""
    copies: Literal["none", "averaged", "exact"] = "none"
    """Replica groups: their copies are averaged now and then (2D-SP), or get the gradients of all groups (HSP)."""

    @property
    def grouped(self) -> bool:
        return self.copies != "none"


SYSTEMS = {
    system.name: system
    for system in (
        System("torchrec", "one stage after another", serial, False),
        System("2d-sp", "the same, All2All within groups", serial, False, "averaged"),
        System("uniemb", "lookup ahead, rows may be stale", stale, False),
        System("dbp", "lookup ahead, exact", dbp, False),
        System("fwp", "micro-batches overlap", fwp, True),
        System("nestpipe", "both", nested, True),
        System("nestpipe+2d-sp", "both, All2All within groups", nested, True, "averaged"),
        System("nestpipe+hsp", "the same, gradients summed over groups", nested, True, "exact"),
    )
}


@functools.cache
def exact(name: str) -> str:
    """What `check` says about a system's schedule.  Groups that are averaged train apart meanwhile, whatever the list."""
    system = SYSTEMS[name]
    if system.copies == "averaged":
        return "no"
    micro_batches = 2 if system.pipelined else 1
    batches, options = 5, replace(DEFAULT, defer_weight_grads=False, replicates=system.copies == "exact")
    mine = build_by(system.builder, batches, micro_batches, options)
    found = examine(mine, build("serial", batches, micro_batches, options))
    return "no" if isinstance(found, Violation) else "yes"
