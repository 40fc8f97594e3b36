"""What each batch of a worker holds: histories, tokens and squared tokens; and what a fixed batch would have held."""

from __future__ import annotations

import threading

import numpy as np

NONE = np.full(3, np.nan)


def sums_of(lengths: np.ndarray) -> np.ndarray:
    """Histories, tokens and squared tokens, float64."""
    n = np.asarray(lengths, np.float64)
    return np.array([len(n), n.sum(), (n * n).sum()])


class Loads:
    """By number of the batch.  The thread that plans adds, another takes what has been trained."""

    def __init__(self) -> None:
        self._known: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()
        self.plans = 0
        self.plan_seconds = 0.0

    def add(self, batch: int, mine: np.ndarray, fixed: np.ndarray | None = None, seconds: float | None = None) -> None:
        """The lengths of this worker's histories, of those in its fixed batch, and what planning took."""
        found = np.concatenate([sums_of(mine), NONE if fixed is None else sums_of(fixed)])
        with self._lock:
            self._known[batch] = found
            if seconds is not None:
                self.plans += 1
                self.plan_seconds += seconds

    def take(self, batch: int) -> np.ndarray:
        """[6]: the sums of this worker's batch, 0 where it had none, and those of its fixed batch, NaN where not known."""
        with self._lock:
            for before in [number for number in self._known if number < batch]:
                del self._known[before]
            return self._known.pop(batch, np.concatenate([np.zeros(3), NONE]))
