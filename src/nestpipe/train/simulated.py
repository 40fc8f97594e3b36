"""Runs on the simulated device: in which orders its streams run, and what it noticed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from nestpipe.device import sim


class SimulatedOrders:
    """Late first, then seeded ones.  What each of them showed on this worker is kept."""

    def __init__(self, seeded: int, steps: int) -> None:
        self._seeded, self._steps = seeded, steps
        self._races: list[str] = []
        self._syncs: dict[str, dict[str, int]] = defaultdict(dict)
        self._runs = 0
        self._annotations: dict[str, int] = {}

    def begin_late(self) -> None:
        sim.configure("late")

    def seeded(self) -> Iterator[str]:
        for seed in range(1, self._seeded + 1):
            sim.configure("random", seed)
            yield f"order {seed}"

    def begin(self) -> None:
        """The model is on the device: from here on, host syncs are those of training."""
        sim.reset_counts()

    def note(self) -> None:
        """Keeps what the device has noticed."""
        found = sim.report()
        self._runs += 1
        self._races += [race for race in found.races if race not in self._races]
        for reason, count in found.annotations.items():
            self._annotations[reason] = self._annotations.get(reason, 0) + count
        for thread, places in found.host_syncs.items():
            for place, count in places.items():
                self._syncs[thread][place] = self._syncs[thread].get(place, 0) + count

    def figures(self) -> dict[str, Any]:
        """Orders, races, annotations, and host syncs a step by thread and place."""
        each = max(1, self._runs * self._steps)
        return {
            "orders": self._runs,
            "races": self._races,
            "annotations": self._annotations,
            "host_syncs_per_step": {
                thread: {place: count / each for place, count in places.items()}
                for thread, places in self._syncs.items()
            },
        }
