"""What the compute lane waited for, from the spans of one worker.

Between two actions of the compute lane the path is followed backwards, as `engine.timeline` does for the sums of a run: the later
one waited for what ended last of all it came after, that for what came before it, and so on until the gap is filled.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nestpipe.schedule.action import label
from nestpipe.schedule.stages import STAGES

COMPUTE = "compute"
BETWEEN = "between"
"""No stage ran: hand-over between lanes, and the caller's own code between two steps."""
UNKNOWN = "unknown"
"""The trace does not say what an action came after: older ones do not."""


@dataclass(frozen=True, slots=True)
class Ran:
    """One action as it ran, in microseconds of the trace."""

    stage: str
    batch: int
    micro: int
    start: float
    stop: float
    after: str | None
    """The label of what ended last of all that it came after."""

    @property
    def lane(self) -> str:
        return STAGES[self.stage].lane


@dataclass(frozen=True, slots=True)
class Wait:
    """A piece of time in which the compute lane stood still, and what it waited for; batch and micro-batch -1: none."""

    stage: str
    batch: int
    micro: int
    start: float
    stop: float


def waits(spans: Sequence[Ran]) -> list[Wait]:
    """In order of time; none before the first action of the compute lane and after its last."""
    by_label = {label((s.stage, s.batch, s.micro)): s for s in spans}
    says = any(s.after is not None for s in spans)
    lane = sorted((s for s in spans if s.lane == COMPUTE), key=lambda s: s.start)
    found: list[Wait] = []
    for before, later in itertools.pairwise(lane):
        if later.start > before.stop:
            path = _path(later, before.stop, by_label) if says else [_none(UNKNOWN, before.stop, later.start)]
            found += reversed(list(path))
    return found


def _path(later: Ran, begin: float, by_label: Mapping[str, Ran]) -> Iterator[Wait]:
    """From the later action back to `begin`."""
    at, seen = later.start, {later}
    previous = by_label.get(later.after) if later.after is not None else None
    while at > begin and previous is not None and previous not in seen and previous.lane != COMPUTE:
        seen.add(previous)
        if previous.stop < at:
            stop = max(previous.stop, begin)
            yield _none(BETWEEN, stop, at)
            at = stop
        start = max(min(previous.start, at), begin)
        if start < at:
            yield Wait(previous.stage, previous.batch, previous.micro, start, at)
            at = start
        previous = by_label.get(previous.after) if previous.after is not None else None
    if at > begin:
        yield _none(BETWEEN, begin, at)


def _none(stage: str, start: float, stop: float) -> Wait:
    return Wait(stage, -1, -1, start, stop)


def stage_sums(spans: Sequence[Ran], waited: Sequence[Wait]) -> dict[str, dict[str, float]]:
    """Busy, hidden and exposed milliseconds per step, for a trace that has no summary beside it."""
    steps = max(1, len({s.batch for s in spans if s.lane == COMPUTE}))
    busy: dict[str, float] = {}
    exposed: dict[str, float] = {}
    for s in spans:
        busy[s.stage] = busy.get(s.stage, 0.0) + s.stop - s.start
        if s.lane == COMPUTE:
            exposed[s.stage] = exposed.get(s.stage, 0.0) + s.stop - s.start
    for wait in waited:
        exposed[wait.stage] = exposed.get(wait.stage, 0.0) + wait.stop - wait.start
    found = {}
    for stage in (*STAGES, BETWEEN, UNKNOWN):
        if stage in busy or stage in exposed:
            out = exposed.get(stage, 0.0)
            ran = busy.get(stage, out)
            sums = {"busy_ms": ran, "hidden_ms": max(0.0, ran - out), "exposed_ms": out}
            found[stage] = {kind: value / 1e3 / steps for kind, value in sums.items()}
    return found
