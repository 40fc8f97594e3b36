"""When each action ran, and from that what was hidden and what was exposed.

Exposed is what the step had to wait for.  The critical path of a step is followed backwards from its last action on the compute
lane: each action on it is exposed for as long as it ran, then comes whatever ended last of the things it waited for.  So exposed
times add up to the step, and busy minus exposed was hidden behind something else.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import NamedTuple

from nestpipe.schedule.action import Action, Name
from nestpipe.schedule.stages import STAGES

BETWEEN = "between"
"""Time on the path in which no stage ran: hand-over between lanes, and the caller's own code between two steps."""


KEPT = 20_000
"""Spans that a trace shows at most: the last hundreds of steps of a run, however long it was."""
FEW = 600
"""Spans that are kept of every run: its last steps, a dozen with 8 micro-batches."""


class Span(NamedTuple):
    """One action as it ran, in seconds of the worker's clock."""

    action: Action
    start: float
    stop: float
    after: Name | None
    """The action before it on its lane."""


class Timeline:
    """Spans of the last steps, and sums over all steps.  One worker; filled by all lanes, read between steps."""

    def __init__(self, keep: bool = False) -> None:
        self.spans: dict[Name, Span] = {}
        self.kept: deque[Span] = deque(maxlen=KEPT if keep else FEW)
        """The last spans; many where `keep` asks for a trace."""
        self.busy: dict[str, float] = defaultdict(float)
        self.exposed: dict[str, float] = defaultdict(float)
        self.steps = 0
        self._last_on_lane: dict[str, Name] = {}

    def add(self, action: Action, start: float, stop: float) -> None:
        """Called by the lane that ran the action; one lane at a time writes its own entries."""
        span = Span(action, start, stop, self._last_on_lane.get(action.lane))
        self._last_on_lane[action.lane] = action.name
        self.spans[action.name] = span
        self.busy[action.stage] += stop - start
        self.kept.append(span)

    def close_step(self, last: Name, begin: float, end: float) -> None:
        """Attributes the time from `begin` to `end`, at whose end `last` was the step's last action on the compute lane."""
        self.steps += 1
        at, name = end, last
        while at > begin:
            span = self.spans.get(name)
            if span is None:
                break
            if span.stop < at:
                gap_start = max(span.stop, begin)
                self.exposed[BETWEEN] += at - gap_start
                at = gap_start
            start = max(min(span.start, at), begin)
            self.exposed[span.action.stage] += at - start
            at = start
            previous = [self.spans[n] for n in (*span.action.after, span.after) if n is not None and n in self.spans]
            if not previous:
                break
            name = max(previous, key=lambda s: s.stop).action.name
        self.exposed[BETWEEN] += max(0.0, at - begin)

    def restart(self) -> None:
        """Begins the sums anew: the first steps, which fill caches and pipelines, should not count."""
        self.busy.clear()
        self.exposed.clear()
        self.steps = 0

    def report(self) -> dict[str, dict[str, float]]:
        """Per stage: busy, hidden and exposed milliseconds per step.  The exposed ones add up to the step."""
        steps = max(1, self.steps)
        stages = [stage for stage in (*STAGES, BETWEEN) if self.busy.get(stage) or self.exposed.get(stage)]
        report = {}
        for stage in stages:
            exposed = self.exposed.get(stage, 0.0)
            busy = self.busy.get(stage, exposed)
            report[stage] = {
                "busy_ms": 1e3 * busy / steps,
                "hidden_ms": 1e3 * max(0.0, busy - exposed) / steps,
                "exposed_ms": 1e3 * exposed / steps,
            }
        return report

    def start_anew(self) -> None:
        """What runs next comes after nothing: a batch that is tried again must not follow its own first try."""
        self._last_on_lane.clear()

    def forget(self, before: int) -> None:
        """Drops the spans of batches before `before`."""
        for name in [n for n in list(self.spans) if n[1] < before]:
            del self.spans[name]


def compute_share(report: Mapping[str, Mapping[str, float]]) -> float:
    """How much of a step the compute lane is busy, from what `Timeline.report` gives."""
    step = sum(ms["exposed_ms"] for ms in report.values())
    busy = sum(ms["busy_ms"] for stage, ms in report.items() if stage in STAGES and STAGES[stage].lane == "compute")
    return busy / step if step else 0.0
