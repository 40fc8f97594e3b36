"""A virtual clock: when each action of a list would run, given what actions cost.  Deterministic, and no device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nestpipe.schedule.action import Action, Name

Cost = Callable[[Action], float]

NOMINAL: dict[str, float] = {
    "load": 2,
    "move": 1,
    "route": 2,
    "retrieve": 3,
    "sync": 1,
    "embed": 2,
    "compute": 4,
    "grad": 2,
    "accumulate": 1,
    "weight_grad": 1,
    "reduce": 1,
    "agree": 1,
    "step": 1,
    "update": 1,
    "writeback": 2,
}
"""What a batch costs in each stage, to draw with: the right order of magnitude on a cluster, and measured nowhere."""

ISSUER = "compute"
"""The engine runs this lane on the thread that issues the list."""


@dataclass(frozen=True, slots=True)
class ClockSpan:
    """One action as it would run."""

    action: Action
    start: float
    stop: float


def run(actions: Iterable[Action], cost: Cost, issuer: str | None = ISSUER) -> list[ClockSpan]:
    """The list on its lanes: each action starts once the one before it on its lane and all that it waits for have stopped.

    Whatever stands behind an action of the `issuer`'s lane is not issued before that has started, as in the engine; with None
    the whole list is issued at time 0.  What may begin within another action is taken to begin after it.  Waits for what is not
    in the list, or stands later in it, count for nothing: `check` it.
    """
    spans: list[ClockSpan] = []
    stops: dict[Name, float] = {}
    lane_free: dict[str, float] = {}
    issued = 0.0
    for action in actions:
        start = max(issued, lane_free.get(action.lane, 0.0), *(stops.get(wait, 0.0) for wait in action.after), 0.0)
        stop = start + cost(action)
        spans.append(ClockSpan(action, start, stop))
        stops[action.name] = lane_free[action.lane] = stop
        if action.lane == issuer:
            issued = start
    return spans


def nominal(actions: Sequence[Action]) -> Cost:
    """The nominal cost of each action of a list; micro-batches share that of their batch."""
    parts = Counter((action.stage, action.batch) for action in actions)
    return lambda action: NOMINAL[action.stage] / parts[action.stage, action.batch]
