import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.config.rates import RateSchedule


def test_warm_up_is_linear_never_zero_and_ends_at_one() -> None:
    """Promise: the rate rises evenly and is whole at step == warmup_steps; no step is spent at rate 0."""
    factors = [RateSchedule(warmup_steps=4).factor(step) for step in range(7)]
    assert factors == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1, 1])


def test_decays_at_known_points() -> None:
    """Promise: linear, cosine and inverse_sqrt have the values of their formulas, counted from the end of warm-up."""
    linear = RateSchedule(10, "linear", 100, 0.2)
    assert [linear.factor(s) for s in (10, 60, 110, 10**9)] == pytest.approx([1, 0.6, 0.2, 0.2])
    cosine = RateSchedule(10, "cosine", 100, 0.2)
    assert [cosine.factor(s) for s in (10, 35, 60, 110, 500)] == pytest.approx(
        [1, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2, 0.2]
    )
    root = RateSchedule(100, "inverse_sqrt", 100, 0.25)
    assert [root.factor(s) for s in (100, 400, 10**6)] == pytest.approx([1, 0.5, 0.25])


@settings(deadline=None)  # the machine may be busy
@given(
    st.builds(
        RateSchedule,
        st.integers(0, 50),
        st.sampled_from(["none", "linear", "cosine", "inverse_sqrt"]),
        st.integers(1, 50),
        st.floats(0, 1),
    )
)
def test_rises_then_falls_within_bounds(schedule: RateSchedule) -> None:
    """Promise: the factor rises to 1 at warmup_steps, then never rises, and stays above 0 and from decay_to on."""
    factors = [schedule.factor(step) for step in range(120)]
    top = schedule.warmup_steps
    assert factors[top] == 1
    assert all(a < b for a, b in pairwise(factors[: top + 1]))
    assert all(a >= b for a, b in pairwise(factors[top:]))
    assert all(0 < f <= 1 for f in factors[: top + 1])
    assert all(schedule.decay_to <= f <= 1 for f in factors[top:])


@pytest.mark.parametrize("values", [(-1,), (0, "linear", 0), (0, "none", -1), (0, "cosine", 5, 1.5)])
def test_bad_settings_name_the_field(values: tuple) -> None:
    """Promise: an impossible schedule is refused when it is made, by the name of the field."""
    with pytest.raises(ValueError, match=r"^(warmup_steps|decay_steps|decay_to) must be"):
        RateSchedule(*values)
