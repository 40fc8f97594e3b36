"""From minutes to batches: a clock that all workers agree on, and the batch that was the first some minutes ago."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

MOST = 4096
"""Times that are remembered: when there are more, every other one is forgotten, and from then on every other batch's, too."""


class AgreedClock:
    """When batches were routed, in seconds by the clock of worker 0, coarser the longer a run is."""

    def __init__(self) -> None:
        self._batches: list[int] = []
        self._seconds: list[float] = []
        self._step = 1

    def note(self, batch: int, seconds: float) -> None:
        """Called once for every batch, in order; a batch that is tried again, or a clock that goes back, changes nothing."""
        if self._batches and (batch < self._batches[-1] + self._step or seconds < self._seconds[-1]):
            return
        self._batches.append(batch)
        self._seconds.append(seconds)
        if len(self._batches) > MOST:
            self._batches, self._seconds = self._batches[::2], self._seconds[::2]
            self._step *= 2

    def state(self, before: int) -> dict[str, Any]:
        """As plain values, of batches before `before`."""
        count = bisect_left(self._batches, before)
        return {"batches": self._batches[:count], "seconds": self._seconds[:count], "step": self._step}

    def restore(self, state: object) -> None:
        """Takes up what `state` gave; ValueError for anything else."""
        if not isinstance(state, dict) or set(state) != {"batches", "seconds", "step"}:
            raise ValueError("a clock has batches, seconds and step")
        batches, seconds, step = state["batches"], state["seconds"], state["step"]
        lists = isinstance(batches, list) and isinstance(seconds, list) and len(batches) == len(seconds) <= MOST
        if not lists or type(step) is not int or step < 1 or not all(type(b) is int for b in batches):
            raise ValueError("a clock has as many seconds as batches")
        if (
            not all(type(s) in (int, float) for s in seconds)
            or sorted(batches) != batches
            or sorted(seconds) != seconds
        ):
            raise ValueError("a clock goes forward")
        self._batches, self._seconds, self._step = list(batches), [float(s) for s in seconds], step

    def horizon(self, seconds: float, age: float) -> int:
        """A batch before which all are older than `age` now, at `seconds`: the latest of those remembered, 0 if there is none."""
        place = bisect_right(self._seconds, seconds - age)
        return self._batches[place - 1] if place else 0
