"""The virtual clock of a cluster: when every action of a list runs on every worker.

As in the engine, an action starts once the action before it on its lane has ended, all that it waits for has ended, and
the compute lane has started what comes before it in the list.  It also needs what lanes share: the host's cores for its
host part, then the link for its wire part.  The lane that is ready first gets them.  An All2All starts when the last of
its workers arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from nestpipe.errors import NestPipeError
from nestpipe.schedule.action import Action, Name
from nestpipe.schedule.stages import CALLERS_LANE, LANES

Times = np.ndarray
"""Milliseconds, one number per worker."""

REMEMBERED = 6
"""Batches to keep: no action waits for one further back."""


@dataclass(frozen=True)
class Cost:
    """The cost of an action in milliseconds; each part is one number for all workers, or one per worker."""

    host: float | Times = 0.0
    """On the host's cores, which its lanes share."""
    device: float | Times = 0.0
    """On the accelerator, or asleep: other lanes do not notice."""
    wire: float | Times = 0.0
    """On the link, which its lanes share."""
    after: float = 0.0
    """After the wire: the latency of a message, whatever its size."""
    groups: int = 0
    """Workers wait for each other before the wire part, in this many groups of neighbours; 0: they do not wait."""
    across: bool = False
    """They wait across those groups instead: the first workers of all groups for each other, the second ones, and so on."""
    ahead: bool = False
    """The host launches the device part ahead of time, so that both parts overlap."""
    from_share: float = 1.0
    """For an action that starts within another one: after this share of it."""


@dataclass(frozen=True, slots=True)
class ActionTimes:
    """One action on all workers."""

    action: Action
    start: Times
    stop: Times


class Deadlock(NestPipeError, RuntimeError):
    """Actions wait for each other; the message is one line."""


def simulate(
    actions: Iterable[Action],
    cost: Callable[[Action], Cost],
    workers: int,
    cores: float = 0.0,
    burst: float = 0.0,
) -> Iterator[ActionTimes]:
    """Runs a list; yields its actions in the order in which they take shared resources.

    `cores` are those of one worker's host; 0: more than its lanes can use, so that none waits.  `burst`: milliseconds
    of wire time that a link passes at once after it has been idle for as long.
    """
    lanes: dict[str, deque[tuple[Action, int]]] = {lane: deque() for lane in LANES}
    begun = 0
    for action in actions:
        lanes[action.lane].append((action, begun))
        begun += action.lane == CALLERS_LANE
    left = sum(map(len, lanes.values()))
    zero = np.zeros(workers)
    issued = [zero]
    """When the compute lane started its actions: each issues all actions up to the next one."""
    runs: dict[Name, ActionTimes] = {}
    lane_free = dict.fromkeys(LANES, zero)
    ready: dict[str, _Ready] = {}
    """What the first action of a lane can do next, once the end of all that it waits for is known."""
    core_free = wire_free = zero
    while left:
        for lane, queue in lanes.items():
            if queue and lane not in ready:
                action, behind = queue[0]
                if behind < len(issued) and all(name in runs for name in action.after):
                    takes = cost(action)
                    start = np.maximum(issued[behind], lane_free[lane])
                    start = np.maximum(start, _waited_for(action, takes, runs))
                    ready[lane] = _Ready(start, start, takes)
        if not ready:
            heads = ", ".join(str(queue[0][0]) for queue in lanes.values() if queue)
            raise Deadlock(f"the schedule is deadlocked: {heads} wait for each other")
        lane = min(ready, key=lambda lane: ready[lane].at.mean())
        now = ready.pop(lane)
        at, takes, action = now.at, now.takes, lanes[lane][0][0]
        if not now.computed:
            if lane == CALLERS_LANE:
                issued.append(now.start)
            if cores and np.any(takes.host):
                at = core_free = np.maximum(at, core_free) + np.asarray(takes.host) / min(1.0, cores)
            else:
                at = at + takes.host
            at = np.maximum(at, now.start + takes.device) if takes.ahead else at + takes.device
            if takes.groups and takes.across:
                at = np.tile(at.reshape(takes.groups, -1).max(axis=0), takes.groups)
            elif takes.groups:
                at = at.reshape(takes.groups, -1).max(axis=1).repeat(workers // takes.groups)
            if np.any(takes.wire):
                ready[lane] = _Ready(now.start, at, takes, computed=True)
                continue
        else:
            wire_free = np.maximum(at - burst, wire_free) + takes.wire
            at = np.maximum(at, wire_free)
        at = at + takes.after
        lanes[lane].popleft()
        left -= 1
        lane_free[lane] = at
        runs[action.name] = ActionTimes(action, now.start, at)
        if action.stage == "step":
            for name in [name for name in runs if name[1] < action.batch - REMEMBERED]:
                del runs[name]
        yield runs[action.name]


@dataclass(frozen=True, slots=True)
class _Ready:
    start: Times
    at: Times
    """When it can continue."""
    takes: Cost
    computed: bool = False
    """Only its wire part is left."""


def _waited_for(action: Action, takes: Cost, runs: dict[Name, ActionTimes]) -> Times | float:
    times = [runs[name].stop for name in action.waits]
    if action.within is not None:
        other = runs[action.within]
        times.append(other.start + takes.from_share * (other.stop - other.start))
    return np.max(times, axis=0) if times else 0.0
