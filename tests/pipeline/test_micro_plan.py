"""How many micro-batches a batch has: given, or tuned alike on all workers, and always to be given back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe import RowWiseAdagrad, TrainPipeline
from nestpipe.comm.world import World
from nestpipe.config.micro_batches import check_micro_batches
from nestpipe.pipeline import tuner
from nestpipe.pipeline.micro_plan import GivenPlan, Measured
from nestpipe.pipeline.tuner import (
    CANDIDATES,
    LEAST_KEPT,
    MOST_ROUNDS,
    TRIAL_STEPS,
    WARMING_STEPS,
    WATCHED_STEPS,
    Tuner,
)
from training import Setting, everything, make_pipeline, my_batches
from workers import run

TRIAL = 2 * TRIAL_STEPS * len(CANDIDATES)
"""Steps of a round with all candidates..."""
FIRST = WARMING_STEPS + TRIAL
"""...and of the first one."""
ALL_ROUNDS = WARMING_STEPS + MOST_ROUNDS * TRIAL


def drive(plan: Tuner, seconds: dict[int, float], batches: range, ahead: int = 4, scale: float = 1.0) -> None:
    """As a schedule does that looks `ahead`: batches are divided before those in front of them are measured."""
    for batch in batches:
        for later in range(batch, batch + ahead + 1):
            plan.of(later)
        step = scale * seconds[plan.of(batch)]
        plan.learn(batch, Measured(step, step / 2, step / 3))


@pytest.mark.parametrize("ahead", [0, 4])
@pytest.mark.parametrize("best", CANDIDATES)
def test_the_fastest_is_chosen(best: int, ahead: int) -> None:
    plan = Tuner()
    drive(plan, {n: 1.0 if n == best else 1.2 for n in CANDIDATES}, range(FIRST + 10), ahead)
    assert [choice.micro_batches for choice in plan.decided] == [best]
    assert plan.of(FIRST + 20) == best and plan.choices[-1][1] == best
    assert f"micro_batches = {best} from batch" in str(plan.decided[0])
    assert "16: 1" in str(plan.decided[0])


def test_the_first_steps_of_a_process_do_not_count() -> None:
    """Promise: who is tried first does not pay for memory that is touched for the first time."""
    plan = Tuner()
    for batch in range(ALL_ROUNDS + 10):
        cold = 5.0 if batch < WARMING_STEPS else 1.0
        plan.learn(batch, Measured(cold * {1: 1.0, 2: 1.02, 4: 1.3, 8: 1.3, 16: 1.3}[plan.of(batch)], 0.0, 0.0))
    assert plan.decided[0].micro_batches == 1 and plan.decided[0].seen[1].step == 1.0


def test_of_two_that_are_as_fast_the_smaller_is_chosen() -> None:
    plan = Tuner()
    drive(plan, {1: 2.0, 2: 1.5, 4: 1.005, 8: 1.0, 16: 1.001}, range(ALL_ROUNDS + 10))
    assert plan.decided[0].micro_batches == 4


def test_those_that_are_close_are_tried_again() -> None:
    """Promise: a disturbance during one visit does not decide, and who is far behind is not tried again."""
    plan, steps = Tuner(), {1: 1.4, 2: 1.0, 4: 1.06, 8: 1.3, 16: 1.5}
    tried: dict[int, int] = dict.fromkeys(CANDIDATES, 0)
    for batch in range(ALL_ROUNDS):
        count = plan.of(batch)
        tried[count] += plan.trying
        first_time = batch < WARMING_STEPS + TRIAL // 2
        disturbed = 1.2 if count == 2 and first_time else 1.0
        plan.learn(batch, Measured(disturbed * steps[count], 0.0, 0.0))
    assert [choice.micro_batches for choice in plan.decided] == [2]
    assert tried[2] == tried[4] == 2 * TRIAL_STEPS * MOST_ROUNDS and tried[16] == 2 * TRIAL_STEPS


def test_a_machine_that_gets_slower_meanwhile_is_fair_to_all() -> None:
    """Promise: every candidate is tried early and late."""
    plan = Tuner()
    for batch in range(FIRST + 10):
        step = {1: 1.3, 2: 1.0, 4: 1.3, 8: 1.3, 16: 1.3}[plan.of(batch)] * (1 + batch / TRIAL)
        plan.learn(batch, Measured(step, 0.0, 0.0))
    assert plan.decided[0].micro_batches == 2


@pytest.mark.parametrize("since", [FIRST - TRIAL // 2, FIRST, FIRST + 5, FIRST + 40])
@pytest.mark.parametrize("slower", [0.5, 1.5, 2.0])
def test_a_machine_that_changes_between_rounds_is_fair_to_all(slower: float, since: int) -> None:
    """Promise: rounds are compared within themselves; who was left behind in one is not taken because a later one was slower."""
    plan = Tuner()
    for batch in range(ALL_ROUNDS + 10):
        step = {1: 1.0, 2: 1.05, 4: 1.2, 8: 1.3, 16: 1.4}[plan.of(batch)] * (slower if batch >= since else 1.0)
        plan.learn(batch, Measured(step, 0.0, 0.0))
    assert [choice.micro_batches for choice in plan.decided] == [1]


def test_drift_is_noticed_and_noise_is_not() -> None:
    """Promise: another link or machine is tuned to, and an hour with small ups and downs is left alone."""
    plan = Tuner()
    fast = dict.fromkeys(CANDIDATES, 2.0) | {8: 1.0}
    drive(plan, fast, range(FIRST + 5))
    end = FIRST + 5 + LEAST_KEPT + 2 * WATCHED_STEPS
    drive(plan, fast, range(FIRST + 5, end), scale=1.1)
    assert len(plan.decided) == 1 and not plan.trying
    slow = dict.fromkeys(CANDIDATES, 4.0) | {2: 3.0}
    drive(plan, slow, range(end, end + WATCHED_STEPS + TRIAL + 10))
    assert [choice.micro_batches for choice in plan.decided] == [8, 2]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.1, 10.0), min_size=TRIAL, max_size=3 * TRIAL), st.integers(0, 5))
def test_the_choices_given_back_are_the_choices(steps: list[float], ahead: int) -> None:
    """Promise: whatever the times, the list in the run directory divides every batch as the tuner did."""
    plan, asked = Tuner(), {}
    for batch, step in enumerate(steps):
        for later in range(batch, batch + ahead + 1):
            asked[later] = plan.of(later)
            assert asked[later] == plan.of(later)
        plan.learn(batch, Measured(step, 0.0, 0.0))
    given_back = GivenPlan(plan.choices)
    assert {batch: given_back.of(batch) for batch in asked} == asked


def test_a_batch_that_was_never_trained_does_not_stop_the_tuner() -> None:
    plan = Tuner()
    for batch in range(ALL_ROUNDS + 10):
        plan.of(batch)
        if batch % 10 != 9:
            plan.learn(batch, Measured(1.0, 0.0, 0.0))
    assert len(plan.decided) == 1


@pytest.mark.parametrize(
    "wrong",
    [0, -1, True, 1 << 15, "automatic", [], [[1, 2]], [[0, 2], [0, 3]], [[0, 0]], [[0]], [0, 2], [[0, 2.0]], 2.0],
)
def test_what_is_no_plan(wrong: Any) -> None:
    with pytest.raises(
        ValueError, match=r"pipeline\.micro_batches must be from 1 to 32767, 'auto', or \[\[first batch"
    ):
        check_micro_batches(wrong)


def tuned_and_given_back(world: World, schedule: str) -> tuple[bool, int, list[tuple[int, int]]]:
    """Trains with "auto", then with what it chose under `serial`; whether all came out the same."""
    setting = Setting(
        "dlrm", RowWiseAdagrad(), "auto", steps=MOST_ROUNDS * 2 * 3 * len(CANDIDATES) + 8, schedule=schedule
    )
    first = make_pipeline(world, setting)
    assert isinstance(first._plan, Tuner)
    with mock.patch.multiple(tuner, TRIAL_STEPS=3, SETTLING_STEPS=1):
        first._plan._begin_trial()
        losses = train(world, first, setting)
    choices = first._plan.choices
    setting = replace(setting, micro_batches=choices, schedule="serial")
    second = make_pipeline(world, setting)
    same = losses == train(world, second, setting) and everything(first) == everything(second)
    first.close()
    second.close()
    return same, len(first._plan.decided), choices


def train(world: World, pipeline: TrainPipeline, setting: Setting) -> list[float]:
    batches, losses = my_batches(world, setting), []
    while step := pipeline.progress(batches):
        losses.append(step.loss)
    pipeline.settle()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["nested", "fwp"])
def test_auto_is_reproduced_by_giving_its_choices_back(schedule: str) -> None:
    """Promise: all workers choose alike, and `serial` with the same choices ends with the same bits."""
    results = run(2, tuned_and_given_back, schedule)
    assert all(same and decided == 1 for same, decided, _ in results)
    assert results[0][2] == results[1][2]
