"""Which part each sample goes to, so that all parts cost as nearly the same as can be.

Greedy, most expensive first, to the cheapest part; then moves and swaps between the most expensive part and any other while
the maximum falls.  Costs become whole numbers first, so the same costs give the same parts on every machine.  Equal costs go by
index.
"""

from __future__ import annotations

import numba
import numpy as np

CLOSE = 1 << 12
"""Done once the most expensive part is within 1 / CLOSE of the mean."""
MOST_TRIES = 1_500_000
"""Pairs of samples that may be compared: bounds the time for very large batches, where greedy is good already."""
_UNITS = 1 << 40


def assign(costs: np.ndarray, parts: int) -> np.ndarray:
    """The part of each sample, int64.  Costs that are NaN, infinite or negative count as 0."""
    return _assign(whole(costs), parts, CLOSE, MOST_TRIES)


def whole(costs: np.ndarray) -> np.ndarray:
    """Costs in whole units, so small that rounding does not matter.  All zero: 1 each, so that counts are even."""
    found = np.asarray(costs, np.float64)
    found = np.where(np.isfinite(found) & (found > 0), found, 0.0)
    most = float(found.max(initial=0.0))
    if not most > 0:
        return np.ones(len(found), np.int64)
    units = min(_UNITS, (1 << 62) // max(1, len(found)))  # their sum fits
    return np.rint(found / most * units).astype(np.int64)


def waiting(loads: np.ndarray) -> np.ndarray:
    """Of loads [..., parts]: the share of the time of the most loaded part that parts wait in the mean; 0 without load."""
    found = np.asarray(loads, np.float64)
    most = found.max(-1)
    return np.where(most > 0, 1 - found.mean(-1) / np.where(most > 0, most, 1.0), 0.0)


@numba.njit(nogil=True, cache=True)
def _assign(costs, parts, close, tries):  # type: ignore[no-untyped-def]
    count = costs.shape[0]
    chosen = np.zeros(count, np.int64)
    if parts == 1 or count == 0:
        return chosen
    order = np.argsort(-costs, kind="mergesort")
    loads = np.zeros(parts, np.int64)
    for at in range(count):
        best = 0
        for p in range(1, parts):
            if loads[p] < loads[best]:
                best = p
        chosen[order[at]] = best
        loads[best] += costs[order[at]]
    _refine(costs, chosen, loads, costs.sum() // parts, close, tries)
    return chosen


@numba.njit(nogil=True, cache=True)
def _refine(costs, chosen, loads, mean, close, tries):  # type: ignore[no-untyped-def]
    """Moves or swaps the pair that lowers the most loaded part's cost most, until nothing does."""
    count, parts = costs.shape[0], loads.shape[0]
    while tries > 0:
        high = 0
        for p in range(1, parts):
            if loads[p] > loads[high]:
                high = p
        top = loads[high]
        if top - mean <= mean // close:
            return
        best, mine, theirs, there = top, -1, -1, -1
        for i in range(count):
            if chosen[i] != high:
                continue
            cost = costs[i]
            for p in range(parts):
                if p != high and max(top - cost, loads[p] + cost) < best:
                    best, mine, theirs, there = max(top - cost, loads[p] + cost), i, -1, p
            for j in range(count):
                less = cost - costs[j]
                if less <= 0 or chosen[j] == high:
                    continue
                after = max(top - less, loads[chosen[j]] + less)
                if after < best:
                    best, mine, theirs, there = after, i, j, chosen[j]
            tries -= count + parts
        if mine < 0:
            return
        less = costs[mine]
        chosen[mine] = there
        if theirs >= 0:
            less -= costs[theirs]
            chosen[theirs] = high
        loads[high] -= less
        loads[there] += less
