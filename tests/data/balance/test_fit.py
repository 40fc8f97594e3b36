"""The cost of a history from measured steps: found in noise, never negative, and only where steps tell."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.data.balance.costs import Cost
from nestpipe.data.balance.fit import LEAST_ROWS, fit, non_negative


def steps(rng: np.random.Generator, cost: Cost, fixed: float, count: int = 120, noise: float = 0.02) -> np.ndarray:
    rows = []
    for _ in range(count):
        n = np.minimum(rng.lognormal(5, 0.8, rng.integers(1, 12)), 2048).round()
        sums = np.array([len(n), n.sum(), (n * n).sum()])
        rows.append([2, *sums, (2 * fixed + cost.of_sums(sums)) * (1 + noise * rng.standard_normal())])
    return np.array(rows)


@pytest.mark.parametrize("cost", [Cost(1e-3, 2e-5, 3e-8), Cost(0, 1e-4, 0), Cost(0, 0, 1e-7), Cost(0, 1e-5, 1e-8)])
def test_fits_find_what_steps_cost(cost: Cost) -> None:
    """On steps that it has not seen the error is that of the noise, though some steps were far too long."""
    rng = np.random.default_rng(3)
    rows = steps(rng, cost, 2e-3)
    rows[::4, 4] *= rng.uniform(1.4, 3, len(rows[::4]))
    fitted = fit(rows)
    assert fitted is not None
    error = fitted.error(steps(rng, cost, 2e-3))
    assert error is not None and error < 0.025
    assert min(fitted.cost.a, fitted.cost.b, fitted.cost.c, fitted.fixed) >= 0


def test_what_tells_nothing_is_not_fitted() -> None:
    """Too few steps, steps of nothing, and times that nobody has seen."""
    rows = steps(np.random.default_rng(1), Cost(), 0.0)
    assert fit(rows[: LEAST_ROWS - 1]) is None
    assert fit(np.zeros((0, 5))) is None
    unseen = rows.copy()
    unseen[:, 4] = np.nan
    assert fit(unseen) is None
    idle = rows.copy()
    idle[:, 1:] = 0
    assert fit(idle) is None
    fitted = fit(rows)
    assert fitted is not None and fitted.error(idle) is None


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_non_negative_least_squares(seed: int, rows: int) -> None:
    """The gradient is 0 where x is positive and never points to a better x where it is 0."""
    rng = np.random.default_rng(seed)
    columns, wanted = rng.standard_normal((rows, 4)), rng.standard_normal(rows)
    columns[:, rng.integers(4)] *= 10.0 ** rng.integers(-6, 6)
    x = non_negative(columns, wanted)
    slope = columns.T @ (columns @ x - wanted) / np.sqrt((columns**2).sum(0))
    assert (x >= 0).all() and (slope >= -1e-4).all() and np.abs(slope[x > 0]).max(initial=0) < 1e-4
