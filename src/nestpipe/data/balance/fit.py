"""The cost of a history from what steps took: non-negative least squares on relative errors, without outliers.

A step of a worker with p micro-batches took  fixed p + a h + b t + c s  seconds, for its h histories, t tokens and s squared
tokens.  Plans need a, b and c alone; without `fixed`, which every worker has, they would have to explain it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from nestpipe.data.balance.costs import Cost

LEAST_ROWS = 16
ROUNDS = 4
"""Fits, each without the outliers of the one before."""
FAR = 4.0
"""An outlier is so many standard deviations off, as estimated from the median."""
NEAR = 0.01
"""Of the time of a step: never an outlier."""


@dataclass(frozen=True)
class Fitted:
    cost: Cost
    fixed: float
    """Of every micro-batch, in seconds."""

    def seconds(self, rows: np.ndarray) -> np.ndarray:
        return self.fixed * rows[:, 0] + self.cost.of_sums(rows[:, 1:4])

    def error(self, rows: np.ndarray) -> float | None:
        """Mean absolute relative error on rows as `fit` takes them; None if none is measured."""
        rows = measured(rows)
        return float(np.mean(np.abs(self.seconds(rows) / rows[:, 4] - 1))) if len(rows) else None


def measured(rows: np.ndarray) -> np.ndarray:
    """Those of steps in which a worker computed something, and the host saw how long."""
    return rows[np.isfinite(rows).all(1) & (rows[:, 1] > 0) & (rows[:, 4] > 0)]


def fit(rows: np.ndarray) -> Fitted | None:
    """From rows [n, 5]: micro-batches, histories, tokens, squared tokens, seconds.  None if they do not tell."""
    rows = measured(rows)
    if len(rows) < LEAST_ROWS:
        return None
    relative = rows[:, :4] / rows[:, 4:]
    found, kept = np.zeros(4), relative
    for _ in range(ROUNDS):
        found = non_negative(kept, np.ones(len(kept)))
        errors = relative @ found - 1
        off = np.abs(errors - np.median(errors))
        inside = relative[off <= max(NEAR, FAR * 1.4826 * float(np.median(off)))]
        if len(inside) < LEAST_ROWS or len(inside) == len(kept):
            break
        kept = inside
    fixed, a, b, c = (float(value) for value in found)
    return Fitted(Cost(a, b, c), fixed) if a + b + c > 0 else None


def non_negative(columns: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The x >= 0 that makes columns x nearest to `wanted`: the best of all sets of a few columns.  Ties go to fewer columns."""
    scale = np.sqrt((columns**2).sum(0))
    usable = np.flatnonzero(scale > 0)
    best, least = np.zeros(columns.shape[1]), float(wanted @ wanted) * (1 - 1e-9)
    for size in range(1, len(usable) + 1):
        for chosen in itertools.combinations(usable, size):
            some = list(chosen)
            x, *_ = np.linalg.lstsq(columns[:, some] / scale[some], wanted, rcond=1e-12)
            if (x < 0).any():
                continue
            left = wanted - columns[:, some] / scale[some] @ x
            if (error := float(left @ left)) < least * (1 - 1e-9):
                best, least = np.zeros(columns.shape[1]), error
                best[some] = x / scale[some]
    return best
