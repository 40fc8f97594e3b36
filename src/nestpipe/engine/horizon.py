"""From minutes to batches: a clock that all workers agree on, and the batch that was the first some minutes ago."""

from __future__ import annotations

from bisect import bisect_right

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

    def horizon(self, seconds: float, age: float) -> int:
        """A batch before which all are older than `age` now, at `seconds`: the latest of those remembered, 0 if there is none."""
        place = bisect_right(self._seconds, seconds - age)
        return self._batches[place - 1] if place else 0
