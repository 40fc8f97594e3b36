"""`micro_batches = "auto"`: tries every number of micro-batches for some steps, keeps the fastest, and tries again on drift.

More micro-batches hide more of the wire and cost more themselves (messages, launches, small matrices).  Where the best number
lies depends on the model, the link and the machine, so it is measured and not computed: forth and back through the candidates, so
that a machine that gets slower meanwhile is fair to all of them, and again with those that are close.  Only numbers that all
workers agree on go in.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from nestpipe.config.micro_batches import AUTO, MicroBatches
from nestpipe.pipeline.micro_plan import GivenPlan, Measured, MicroPlan

CANDIDATES = (1, 2, 4, 8, 16)
TRIAL_STEPS = 7
"""Of a candidate, each time it is tried."""
SETTLING_STEPS = 3
"""Of those, not counted: batches of the candidate before are still on their way."""
WARMING_STEPS = 7
"""Before the first trial: a process touches its memory for the first time, which would count against the first candidate."""
MOST_ROUNDS = 3
"""Forth and back through the candidates..."""
CLOSE = 1.15
"""...of which, after a round, those stay that are within so much of the fastest."""
GOOD_ENOUGH = 1.01
"""The fewest micro-batches whose step is within so much of the fastest are taken."""
WATCHED_STEPS = 60
DRIFT = 1.25
"""Tried anew when the median of the last steps is so much above or below what it was after the choice..."""
LEAST_KEPT = 600
"""...and the choice has been kept for so many steps: trying costs some, too."""


@dataclass(frozen=True)
class Choice:
    """What was chosen, from which batch on, and what was seen: per candidate the medians of its steps."""

    batch: int
    micro_batches: int
    seen: dict[int, Measured]

    def __str__(self) -> str:
        tried = ", ".join(
            f"{n}: {1e3 * m.step:.0f} ms (compute {1e3 * m.compute:.0f}, wire {1e3 * m.wire:.0f})"
            for n, m in sorted(self.seen.items())
        )
        return f"micro_batches = {self.micro_batches} from batch {self.batch} on; a step took, with {tried}"


class Tuner:
    """A `MicroPlan` that measures.  `of` is called for rising batches, some ahead of those that `learn` tells of."""

    def __init__(self, candidates: Sequence[int] = CANDIDATES) -> None:
        self._candidates = tuple(candidates)
        self.choices: list[tuple[int, int]] = []
        self.decided: list[Choice] = []
        self._trial: deque[int] = deque()
        """Micro-batches of the trial's batches that are still to come."""
        self._trial_length = 0
        """Without those that warm up before it."""
        self._counted: dict[int, int] = {}
        """Batches of the trial whose step counts, and their number of micro-batches, until they are learnt."""
        self._rounds: list[dict[int, list[Measured]]] = []
        """Of the trial: per candidate of each round what its steps took."""
        self._current = self._candidates[0]
        self._next = 0
        self._last_steps: deque[float] = deque(maxlen=WATCHED_STEPS)
        self._usual: float | None = None
        self._kept = 0
        self._begin_trial()
        self._trial.extendleft([self._current] * WARMING_STEPS)

    def of(self, batch: int) -> int:
        if batch < self._next:  # asked again: a new epoch begins with batches that were only looked ahead to
            return next(count for first, count in reversed(self.choices) if first <= batch)
        self._next = batch + 1
        if self._trial:
            place = len(self._trial)
            self._current = self._trial.popleft()
            if place <= self._trial_length and (-place) % TRIAL_STEPS >= SETTLING_STEPS:
                self._counted[batch] = self._current
        if not self.choices or self.choices[-1][1] != self._current:
            self.choices.append((batch, self._current))
        return self._current

    def learn(self, batch: int, measured: Measured) -> None:
        if not self.trying:
            if batch >= self.decided[-1].batch:
                self._watch(measured.step)
            return
        for dropped in [b for b in self._counted if b < batch]:  # its step was never taken: a loss that was not finite
            del self._counted[dropped]
        if batch in self._counted:
            self._rounds[-1].setdefault(self._counted.pop(batch), []).append(measured)
        if not self.trying:
            self._end_round()

    def resume(self, batch: int, choices: Sequence[tuple[int, int]]) -> None:
        """Goes on from `batch` with what an earlier process had chosen; tried anew, as the machine may be another."""
        self.choices = [choice for choice in choices if choice[0] < batch]
        self._next = batch

    @property
    def trying(self) -> bool:
        return bool(self._trial or self._counted)

    def _begin_trial(self) -> None:
        self._counted, self._rounds = {}, []
        self._try(self._candidates)

    def _try(self, candidates: Sequence[int]) -> None:
        self._rounds.append({})
        forth_and_back = (*candidates, *reversed(candidates))
        self._trial = deque(n for n in forth_and_back for _ in range(TRIAL_STEPS))
        self._trial_length = len(self._trial)

    def _end_round(self) -> None:
        if not self._rounds[-1]:  # none of its steps was taken
            self._begin_trial()
            return
        slower = self._how_much_slower()
        fastest = min(slower.values())
        close = sorted(n for n, times in slower.items() if times <= fastest * CLOSE)
        if len(close) > 1 and len(self._rounds) < MOST_ROUNDS:
            self._try(close)
            return
        self._current = min(n for n, times in slower.items() if times <= fastest * GOOD_ENOUGH)
        everything: dict[int, list[Measured]] = {}
        for taken in self._rounds:
            for n, steps in taken.items():
                everything.setdefault(n, []).extend(steps)
        seen = {n: _median(steps) for n, steps in everything.items()}
        self.decided.append(Choice(self._next, self._current, seen))
        self._last_steps.clear()
        self._usual, self._kept = None, 0

    def _how_much_slower(self) -> dict[int, float]:
        """Of the last round's candidates: their steps over those of all of them, in the middle one of the rounds.

        Compared within a round, since the machine may have become slower from one to the next.
        """
        slower: dict[int, list[float]] = {n: [] for n in self._rounds[-1]}
        for taken in self._rounds:
            medians = {n: _median(taken[n]).step for n in slower if n in taken}
            usual = statistics.fmean(medians.values()) or 1.0
            for n, step in medians.items():
                slower[n].append(step / usual)
        return {n: statistics.median(times) for n, times in slower.items()}

    def _watch(self, step: float) -> None:
        self._last_steps.append(step)
        self._kept += 1
        if len(self._last_steps) < WATCHED_STEPS:
            return
        now = statistics.median(self._last_steps)
        if not self._usual:
            self._usual = now
        elif self._kept >= LEAST_KEPT and not 1 / DRIFT <= now / self._usual <= DRIFT:
            self._begin_trial()


def _median(steps: Sequence[Measured]) -> Measured:
    return Measured(*(statistics.median(values) for values in zip(*((m.step, m.compute, m.wire) for m in steps))))


def make_plan(wanted: MicroBatches) -> MicroPlan:
    if wanted == AUTO:
        return Tuner()
    assert not isinstance(wanted, str), wanted
    return GivenPlan([(0, wanted)] if isinstance(wanted, int) else wanted)
