"""The eviction policy of a table: when a key gets a row, and when it loses it again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_FREQUENCY = 2**30
"""Counting stops here."""


@dataclass(frozen=True)
class EvictionPolicy:
    """Admission and eviction of one table.  Only tables with equal policies can share a group.

    The frequency of a key is the number of batches that it occurred in, on any worker and however often.  A sweep runs
    before every batch whose number is a multiple of `sweep_every`, except batch 0.  It looks at the rows as the batch
    before left them, and it never evicts the keys of that batch.
    """

    admit_after: int = 1
    """Frequency at which a key gets a row and is trained.  Before, it reads its first value; gradients are dropped."""
    ttl_steps: int | None = None
    """A sweep evicts keys that none of the last `ttl_steps` batches touched."""
    ttl_minutes: float | None = None
    """A sweep evicts keys that no batch of the last `ttl_minutes` minutes touched, by the clock of worker 0."""
    max_rows: int | None = None
    """Rows of the table over all workers.  A worker above its share evicts the rows with the lowest frequency."""
    sweep_every: int = 100
    """Batches from one sweep to the next."""
    ttl_horizons: tuple[tuple[int, int], ...] | None = None
    """The decisions of another run's `ttl_minutes`, used instead of a clock.  Pairs (sweep, batch): from that sweep on,
    keys last touched before that batch are evicted."""

    def __post_init__(self) -> None:
        for name in ("admit_after", "ttl_steps", "max_rows", "sweep_every"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_FREQUENCY:
                raise ValueError(f"{name} must be a whole number from 1 to {MAX_FREQUENCY}, not {value}")
        if self.ttl_minutes is not None and not 0 < self.ttl_minutes < math.inf:
            raise ValueError(f"ttl_minutes must be above 0 and finite, not {self.ttl_minutes}")
        if self.ttl_horizons is not None:
            self._check_horizons(self.ttl_horizons)

    def _check_horizons(self, horizons: Sequence[Sequence[int]]) -> None:
        if self.ttl_minutes is None:
            raise ValueError("ttl_horizons needs ttl_minutes: it records what ttl_minutes decided in another run")
        before = (0, -1)
        for pair in horizons:
            right = len(pair) == 2 and all(isinstance(n, int) for n in pair) and 0 <= pair[1] < pair[0]
            if not (right and pair[0] > before[0] and pair[1] > before[1]):
                raise ValueError(
                    "ttl_horizons must be pairs of a sweep's batch and an earlier batch, both ascending, for example "
                    f"[[100, 12], [200, 96]]; {list(pair)} is not"
                )
            before = (pair[0], pair[1])

    @property
    def sweeps(self) -> bool:
        """Whether rows are ever evicted."""
        return any(limit is not None for limit in (self.ttl_steps, self.ttl_minutes, self.max_rows))

    @property
    def by_the_clock(self) -> bool:
        """Whether eviction depends on a clock."""
        return self.ttl_minutes is not None and self.ttl_horizons is None

    def sweep_is_due(self, batch: int) -> bool:
        return self.sweeps and batch > 0 and batch % self.sweep_every == 0

    def share(self, workers: int) -> int | None:
        """Rows of a table that each worker may hold."""
        return None if self.max_rows is None else -(-self.max_rows // workers)

    def given_horizon(self, batch: int) -> int:
        """The horizon that `ttl_horizons` gives for the sweep before `batch`."""
        return max((horizon for sweep, horizon in self.ttl_horizons or () if sweep <= batch), default=0)


TableLife = EvictionPolicy
"""Old name of `EvictionPolicy`."""
