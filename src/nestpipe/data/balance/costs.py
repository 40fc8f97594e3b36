"""What a history of n tokens costs, a + b n + c n^2, and from which batch on: the same on every worker.

Coefficients may be fitted while running.  Streams read ahead, so a fit after step s holds from batch s + AHEAD, and no stream
plans that batch before the fit is known.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from nestpipe.data.source import DataError
from nestpipe.files.location import Location

AHEAD = 16
"""More than any schedule and any stream read ahead together; fewer and they would wait for each other for ever."""
MOST_BYTES = 1 << 26
"""Of a file of costs: a million of them."""


@dataclass(frozen=True)
class Cost:
    """Of a history.  Only ratios matter to a plan; fitted ones are in seconds."""

    a: float = 0.0
    b: float = 1.0
    c: float = 1e-3

    def __post_init__(self) -> None:
        values = (self.a, self.b, self.c)
        if not all(_is_number(value) and value >= 0 for value in values) or not any(values):
            raise ValueError(f"a, b and c must be finite numbers, none below 0 and not all 0, not {values}")

    def of(self, lengths: np.ndarray) -> np.ndarray:
        n = np.asarray(lengths, np.float64)
        return self.a + self.b * n + self.c * (n * n)  # one operation at a time: the same bits on every machine

    def of_sums(self, sums: np.ndarray) -> np.ndarray:
        """Of loads [..., 3]: their histories, tokens and squared tokens."""
        return sums[..., 0] * self.a + sums[..., 1] * self.b + sums[..., 2] * self.c


@dataclass(frozen=True)
class CostFrom:
    """The cost from a batch on."""

    batch: int
    a: float
    b: float
    c: float
    source: str = "given"
    """Where it is from: "default", "flops", "fit" or "given"."""
    error: float | None = None
    """Of a fit: mean absolute relative error on steps that it had not seen; None where there were none."""

    def __post_init__(self) -> None:
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 0:
            raise ValueError(f"batch must be a whole number from 0 up, not {self.batch!r}")
        if not isinstance(self.source, str) or not (self.error is None or _is_number(self.error)):
            raise ValueError(f"source must be a text and error a number, not {self.source!r} and {self.error!r}")
        _ = self.cost

    @property
    def cost(self) -> Cost:
        return Cost(self.a, self.b, self.c)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def costs_from(found: object) -> list[CostFrom]:
    """What `as_dict` gave, in a list.  ValueError unless batches rise from 0."""
    known = {field.name for field in fields(CostFrom)}
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise ValueError("it must have a list 'costs' that is not empty")
    entries = []
    for one in found:
        if not isinstance(one, Mapping) or not {"batch", "a", "b", "c"} <= set(one) <= known:
            raise ValueError(f"an entry of 'costs' has batch, a, b and c, not {one!r}")
        entries.append(CostFrom(**one))
    batches = [entry.batch for entry in entries]
    if batches[0] != 0 or sorted(set(batches)) != batches:
        raise ValueError("the batches of 'costs' must rise from 0")
    return entries


def read_costs(path: str) -> list[CostFrom]:
    """The costs in a run's balance.json."""
    advice = "give the balance.json of a run"
    try:
        found = json.loads(Location(path).read(MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"data.balance_costs: {path} cannot be read ({error}): {advice}") from None
    try:
        return costs_from(found.get("costs") if isinstance(found, dict) else None)
    except (ValueError, TypeError) as error:
        raise DataError(f"data.balance_costs: {path} has no costs ({error}): {advice}") from None


class CostPlan:
    """The cost of every batch.  One thread adds fits, those of streams ask."""

    def __init__(self, entries: Sequence[CostFrom], every: int | None = None, began: int = 0) -> None:
        """`every`: a fit is told after every so many steps, from step `began` on; None: what is known is all."""
        self.entries = list(entries)
        self._every = every
        self._told = began
        self._changed = threading.Condition()

    @property
    def fits(self) -> bool:
        return self._every is not None

    def due(self, step: int) -> bool:
        """Whether a fit is told after this step."""
        return self._every is not None and step % self._every == 0

    def tell(self, step: int, cost: Cost | None, error: float | None = None) -> CostFrom | None:
        """What the fit after `step` gave; None: nothing new.  All workers call it with the same."""
        assert self.due(step) and step > self._told
        entry = None if cost is None else CostFrom(step + AHEAD, cost.a, cost.b, cost.c, "fit", error)
        with self._changed:
            if entry is not None:
                self.entries.append(entry)
            self._told = step
            self._changed.notify_all()
        return entry

    def at(self, batch: int, closing: Callable[[], bool] = lambda: False) -> Cost | None:
        """The cost for a batch, waiting for a fit that is due before; None once `closing` while waiting."""
        if self._every is not None:
            needed = (batch - AHEAD) // self._every * self._every
            with self._changed:
                while self._told < needed:
                    if closing():
                        return None
                    self._changed.wait(0.05)
        return self.known(batch)

    def known(self, batch: int) -> Cost:
        """The cost for a batch, of what has been told."""
        return next(entry.cost for entry in reversed(list(self.entries)) if entry.batch <= batch)
