"""The virtual clock keeps lanes in order, keeps waits, and issues the list as the engine does."""

from __future__ import annotations

import itertools

import pytest

from nestpipe.schedule import BUILDERS, LANES, STAGES, build
from nestpipe.schedule.clock import nominal, run
from nestpipe.schedule.stages import CALLERS_LANE


def test_every_stage_has_a_nominal_cost() -> None:
    assert all(stage.cost > 0 for stage in STAGES.values())


@pytest.mark.parametrize("issuer", [CALLERS_LANE, None])
@pytest.mark.parametrize("schedule", BUILDERS)
def test_lanes_and_waits_are_kept(schedule: str, issuer: str | None) -> None:
    actions = build(schedule, 5, 3)
    spans = run(actions, nominal(actions), issuer)
    assert [s.action for s in spans] == actions
    stops = {s.action.name: s.stop for s in spans}
    for span in spans:
        assert all(stops[wait] <= span.start for wait in span.action.waits)
    for lane in LANES:
        mine = [s for s in spans if s.action.lane == lane]
        assert all(a.stop <= b.start for a, b in itertools.pairwise(mine))


def test_serial_is_the_sum_and_micro_batches_share_the_cost() -> None:
    for micros in (1, 2, 4):
        actions = build("serial", 3, micros)
        assert max(s.stop for s in run(actions, nominal(actions))) == pytest.approx(
            3 * sum(STAGES[stage].cost for stage in {a.stage for a in actions})
        )


def test_dbp_hides_what_it_is_meant_to_hide() -> None:
    """A step is from one sync to the next: nothing before `sync` and no writeback is in it, and the dense path runs beside."""
    actions = build("dbp", 8, 1)
    starts = [s.start for s in run(actions, nominal(actions)) if s.action.stage == "sync"]
    hidden = (
        "peek",
        "replicate",
        "average",
        "load",
        "move",
        "route",
        "retrieve",
        "writeback",
        "weight_grad",
        "reduce",
        "agree",
        "step",
    )
    step = sum(stage.cost for stage in STAGES.values() if stage.name not in hidden)
    assert {b - a for a, b in itertools.pairwise(starts)} == {step}


def test_batches_are_prepared_when_the_one_before_has_computed() -> None:
    """However fast data comes, it is read for the step after this one and not further ahead."""
    actions = build("dbp", 8, 1)
    spans = {str(s.action): s for s in run(actions, nominal(actions), issuer=None)}
    assert (
        spans["load 7"].start == spans["weight_grad 2"].stop and spans["route 5"].start >= spans["weight_grad 2"].stop
    )


def test_nothing_is_issued_before_the_issuer_has_come_to_it() -> None:
    """The engine runs `step` on the thread that issues: if it is late, so are the rows for the next batch's second part."""
    actions = build("nested", 4, 4)
    engine, free = (
        {str(s.action): s.start for s in run(actions, lambda a: 9 if a.stage == "agree" else 1, issuer)}
        for issuer in (CALLERS_LANE, None)
    )
    assert engine["embed 1.1"] >= engine["step 0"] > free["embed 1.1"]
    assert all(free[name] <= start for name, start in engine.items())
