"""A virtual clock: when each action of a list would run, given what actions cost.  Deterministic, and no device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from nestpipe.schedule.action import Action, Name
from nestpipe.schedule.stages import CALLERS_LANE, STAGES

Cost = Callable[[Action], float]


@dataclass(frozen=True, slots=True)
class ClockSpan:
    """One action as it would run."""

    action: Action
    start: float
    stop: float


def run(actions: Iterable[Action], cost: Cost, issuer: str | None = CALLERS_LANE) -> list[ClockSpan]:
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
    return lambda action: STAGES[action.stage].cost / parts[action.stage, action.batch]
