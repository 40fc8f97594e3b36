"""From minutes to batches: a clock that all workers agree on, and the batch that it reached some minutes ago."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any

MOST = 4096
"""Times kept.  Above that, every other one is dropped and the clock records half as often from then on."""


class AgreedClock:
    """When each batch was routed, in seconds by the clock of worker 0.  Gets coarser as a run gets longer."""

    def __init__(self) -> None:
        self._batches: list[int] = []
        self._seconds: list[float] = []
        self._step = 1

    def note(self, batch: int, seconds: float) -> None:
        """Called once per batch, in order.  A repeated batch and a clock that runs backwards change nothing."""
        if self._batches and (batch < self._batches[-1] + self._step or seconds < self._seconds[-1]):
            return
        self._batches.append(batch)
        self._seconds.append(seconds)
        if len(self._batches) > MOST:
            self._batches, self._seconds = self._batches[::2], self._seconds[::2]
            self._step *= 2

    def state(self, before: int) -> dict[str, Any]:
        """The times of batches before `before`, as plain values.  Checkpoints store these names."""
        count = bisect_left(self._batches, before)
        return {"batches": self._batches[:count], "seconds": self._seconds[:count], "step": self._step}

    def restore(self, state: object) -> None:
        """Restores what `state` returned.  ValueError for anything else."""
        if not isinstance(state, dict) or set(state) != {"batches", "seconds", "step"}:
            raise ValueError("a clock must have batches, seconds and step")
        batches, seconds, step = state["batches"], state["seconds"], state["step"]
        lists = isinstance(batches, list) and isinstance(seconds, list) and len(batches) == len(seconds) <= MOST
        if not lists or type(step) is not int or step < 1 or not all(type(b) is int for b in batches):
            raise ValueError("a clock must have as many seconds as batches")
        if (
            not all(type(s) in (int, float) for s in seconds)
            or sorted(batches) != batches
            or sorted(seconds) != seconds
        ):
            raise ValueError("the times of a clock must ascend")
        self._batches, self._seconds, self._step = list(batches), [float(s) for s in seconds], step

    def horizon(self, seconds: float, age: float) -> int:
        """The latest recorded batch that is at least `age` old at time `seconds`; 0 if there is none."""
        place = bisect_right(self._seconds, seconds - age)
        return self._batches[place - 1] if place else 0
