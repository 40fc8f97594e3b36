"""How long rows live: when a key gets one, and when it loses it again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_SIGHTINGS = 2**30
"""Where counting stops: what is counted more often is as frequent as can be."""


@dataclass(frozen=True)
class EvictionPolicy:
    """Admission and eviction of one table.  Tables that live alike are stored and moved together.

    A sighting of a key is a batch that it occurs in, on whichever worker and however often.  A sweep goes before every batch
    whose number is a multiple of `sweep_every` (not before batch 0), over the rows as they are after the batch before it.  Keys
    of that batch are never evicted.
    """

    admit_after: int = 1
    """Sightings until a key gets a row; the last of them trains it.  Before, it reads its first value, gradients are dropped."""
    ttl_steps: int | None = None
    """A sweep evicts keys that none of the last so many batches has touched."""
    ttl_minutes: float | None = None
    """A sweep evicts keys that no batch of the last so many minutes has touched, by the clock of worker 0."""
    max_rows: int | None = None
    """Rows of the table on all workers together; above its share, a worker's sweep evicts those that were seen least."""
    sweep_every: int = 100
    """Batches from sweep to sweep."""
    ttl_horizons: tuple[tuple[int, int], ...] | None = None
    """What `ttl_minutes` came to in another run, in place of a clock: from a sweep (first number) on, keys go that were last
    touched before a batch (second number)."""

    def __post_init__(self) -> None:
        for name in ("admit_after", "ttl_steps", "max_rows", "sweep_every"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MOST_SIGHTINGS:
                raise ValueError(f"{name} must be a whole number from 1 to {MOST_SIGHTINGS}, not {value}")
        if self.ttl_minutes is not None and not 0 < self.ttl_minutes < math.inf:
            raise ValueError(f"ttl_minutes must be above 0 and finite, not {self.ttl_minutes}")
        if self.ttl_horizons is not None:
            self._check_horizons(self.ttl_horizons)

    def _check_horizons(self, horizons: Sequence[Sequence[int]]) -> None:
        if self.ttl_minutes is None:
            raise ValueError("ttl_horizons needs ttl_minutes beside it: they are what minutes came to in another run")
        before = (0, -1)
        for pair in horizons:
            right = len(pair) == 2 and all(isinstance(n, int) for n in pair) and 0 <= pair[1] < pair[0]
            if not (right and pair[0] > before[0] and pair[1] > before[1]):
                raise ValueError(
                    "ttl_horizons must be pairs of a sweep's batch and an earlier one, both rising, such as "
                    f"[[100, 12], [200, 96]]; {list(pair)} is not"
                )
            before = (pair[0], pair[1])

    @property
    def sweeps(self) -> bool:
        """Whether anything is ever evicted."""
        return any(limit is not None for limit in (self.ttl_steps, self.ttl_minutes, self.max_rows))

    @property
    def by_the_clock(self) -> bool:
        """Whether it takes a clock to say what is evicted."""
        return self.ttl_minutes is not None and self.ttl_horizons is None

    def sweep_is_due(self, batch: int) -> bool:
        return self.sweeps and batch > 0 and batch % self.sweep_every == 0

    def share(self, workers: int) -> int | None:
        """Rows that each worker may hold of a table."""
        return None if self.max_rows is None else -(-self.max_rows // workers)

    def given_horizon(self, batch: int) -> int:
        """What `ttl_horizons` says for a sweep."""
        return max((horizon for sweep, horizon in self.ttl_horizons or () if sweep <= batch), default=0)
