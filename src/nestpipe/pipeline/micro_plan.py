"""Into how many micro-batches each batch is divided: one number for all, a list given back from an earlier run, or tuned."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Measured:
    """What one step took, in seconds, meant over all workers: the same numbers on every one of them."""

    step: float
    compute: float
    wire: float


class MicroPlan(Protocol):
    """Asked once for every batch, in order, and told of every step, alike on all workers: so all of them divide alike."""

    def of(self, batch: int) -> int: ...

    def learn(self, batch: int, measured: Measured) -> None: ...

    @property
    def choices(self) -> list[tuple[int, int]]:
        """(first batch, micro-batches) so far; giving it back makes a run whose digest is the same."""


class GivenPlan:
    """Known beforehand."""

    def __init__(self, choices: Sequence[Sequence[int]]) -> None:
        self._first, self._counts = (list(numbers) for numbers in zip(*choices))

    def of(self, batch: int) -> int:
        return self._counts[bisect.bisect_right(self._first, batch) - 1]

    def learn(self, batch: int, measured: Measured) -> None:
        pass

    @property
    def choices(self) -> list[tuple[int, int]]:
        return list(zip(self._first, self._counts))
