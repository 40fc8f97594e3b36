"""Into how many micro-batches each batch is divided: one number for all, a list given back from an earlier run, or tuned."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

AUTO = "auto"
MAX_MICRO_BATCHES = 1 << 15
"""Exclusive: a key message says in 15 bits in which micro-batch a row is used last."""
Wanted = int | str | Sequence[Sequence[int]]
"""`pipeline.micro_batches` as a recipe has it: 8, "auto", or [[0, 4], [60, 8]]: 4 from batch 0 on, 8 from batch 60 on."""


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


def check_micro_batches(wanted: Wanted) -> None:
    """ValueError unless it is one of the three kinds."""
    if wanted == AUTO or _count(wanted):
        return
    if isinstance(wanted, list | tuple) and wanted:
        pairs = [pair for pair in wanted if isinstance(pair, list | tuple) and len(pair) == 2]
        firsts, counts = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        rising = all(type(a) is int and type(b) is int and a < b for a, b in pairwise([-1, *firsts]))
        if len(pairs) == len(wanted) and rising and firsts[0] == 0 and all(map(_count, counts)):
            return
    raise ValueError(
        f"pipeline.micro_batches must be from 1 to {MAX_MICRO_BATCHES - 1}, 'auto', or [[first batch, micro-batches], ...] "
        f"from batch 0 on, not {wanted!r}"
    )


def _count(value: object) -> bool:
    return type(value) is int and 1 <= value < MAX_MICRO_BATCHES
