"""The systems that are compared: each a schedule and a topology, none a number."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from nestpipe.schedule import Builder, Options, build, build_by, dbp, fwp, nested, serial
from nestpipe.schedule.action import Action
from nestpipe.schedule.check import Violation, examine
from nestpipe.schedule.options import DEFAULT


def stale(step: int, micro_batches: int, start: int = 0, options: Options = DEFAULT) -> list[Action]:
    """A prefetcher as many have it: `dbp`, but nobody copies rows that the last batch has changed since they were read.

    Rows of the next batch go on their way when the dense step is over, whatever their own update does.  `check` refuses it.
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
    """Micro-batches: the profile's number, or one."""
    grouped: bool = False
    """2D sparse parallelism."""


SYSTEMS = {
    system.name: system
    for system in (
        System("torchrec", "one stage after another", serial, False),
        System("2d-sp", "the same, All2All within groups", serial, False, True),
        System("uniemb", "lookup ahead, rows may be stale", stale, False),
        System("dbp", "lookup ahead, exact", dbp, False),
        System("fwp", "micro-batches overlap", fwp, True),
        System("nestpipe", "both", nested, True),
        System("nestpipe+2d-sp", "both, All2All within groups", nested, True, True),
    )
}


@functools.cache
def exact(name: str) -> str:
    """What `check` says of a system's schedule: "yes" or "no".  Of groups it cannot tell: their copies are summed in some way."""
    system = SYSTEMS[name]
    if system.grouped:
        return "as its groups are"
    micro_batches = 2 if system.pipelined else 1
    batches, options = 5, replace(DEFAULT, defer_weight_grads=False)
    mine = build_by(system.builder, batches, micro_batches, options)
    found = examine(mine, build("serial", batches, micro_batches, options))
    return "no" if isinstance(found, Violation) else "yes"
