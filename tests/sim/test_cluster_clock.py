"""The cluster's clock: as the schedule's own where nothing is shared, and what sharing and waiting for others add."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.schedule import BUILDERS, build
from nestpipe.schedule.action import Action, act
from nestpipe.schedule.clock import run
from nestpipe.schedule.options import DEFAULT
from nestpipe.schedule.stages import STAGES
from nestpipe.sim.clock import Cost, Deadlock, simulate


def spans(actions, cost, workers=1, cores=0.0):
    return {one.action.name: (one.start, one.stop) for one in simulate(actions, cost, workers, cores)}


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(BUILDERS)),
    st.integers(1, 6),
    st.integers(1, 5),
    st.fixed_dictionaries({stage: st.integers(0, 9) for stage in STAGES}),
    st.booleans(),
)
def test_where_nothing_is_shared_it_is_the_clock_of_one_schedule(name, batches, micros, takes, defer_weight_grads):
    actions = build(name, batches, micros, replace(DEFAULT, defer_weight_grads=defer_weight_grads))
    plain = {span.action.name: (span.start, span.stop) for span in run(actions, lambda a: takes[a.stage])}
    found = spans(actions, lambda a: Cost(device=takes[a.stage]))
    assert {name: (start[0], stop[0]) for name, (start, stop) in found.items()} == plain


def test_an_exchange_begins_when_the_last_worker_has_come():
    actions = [act("compute", 0, 0), act("grad", 0, 0, (("compute", 0, 0),))]
    slow = np.array([1.0, 5.0, 2.0, 3.0])

    def cost(groups):
        return lambda a: Cost(device=slow) if a.stage == "compute" else Cost(wire=1.0, groups=groups)

    assert spans(actions, cost(1), 4)["grad", 0, 0][1].tolist() == [6.0] * 4
    assert spans(actions, cost(2), 4)["grad", 0, 0][1].tolist() == [6.0, 6.0, 4.0, 4.0]
    assert spans(actions, cost(0), 4)["grad", 0, 0][1].tolist() == [2.0, 6.0, 3.0, 4.0]


def test_copies_wait_across_groups():
    """Promise: in `replicate` a worker waits for those at its own place in other groups, not for its neighbours."""
    actions = [act("compute", 0, 0), act("replicate", 0, 0, (("compute", 0, 0),))]
    slow = np.array([1.0, 5.0, 2.0, 3.0])

    def cost(action: Action) -> Cost:
        return Cost(device=slow) if action.stage == "compute" else Cost(wire=1.0, groups=2, across=True)

    assert spans(actions, cost, 4)["replicate", 0, 0][1].tolist() == [3.0, 6.0, 3.0, 6.0]


def test_lanes_share_the_link_in_the_order_in_which_they_are_ready():
    actions = [act("reduce", 0, 0), act("route", 0)]  # two lanes
    both = {"reduce": Cost(device=2.0, wire=10.0), "route": Cost(device=1.0, wire=3.0)}
    found = spans(actions, lambda a: both[a.stage])
    assert found["route", 0, -1][1] == 4.0  # ready first, although later in the list
    assert found["reduce", 0, 0][1] == 14.0


def test_lanes_share_the_cores_of_a_host():
    actions = [act("load", 0), act("retrieve", 0)]
    assert max(stop[0] for _, stop in spans(actions, lambda a: Cost(host=4.0)).values()) == 4.0
    assert max(stop[0] for _, stop in spans(actions, lambda a: Cost(host=4.0), cores=1.0).values()) == 8.0
    assert max(stop[0] for _, stop in spans(actions, lambda a: Cost(host=4.0), cores=0.5).values()) == 16.0


def test_a_bucket_begins_when_its_part_is_final():
    weights = act("weight_grad", 0)
    buckets = [act("reduce", 0, b, within=weights.name) for b in range(2)]

    def cost(action: Action) -> Cost:
        return Cost(device=8.0) if action.stage == "weight_grad" else Cost(wire=1.0, from_share=(action.micro + 1) / 2)

    found = spans([weights, *buckets], cost)
    assert found["reduce", 0, 0][1] == 5.0 and found["reduce", 0, 1][1] == 9.0


def test_actions_that_wait_for_each_other_are_named():
    actions = [act("load", 0, waits=(("route", 0, -1),)), act("route", 0, waits=(("load", 0, -1),))]
    with pytest.raises(Deadlock, match=r"load 0, route 0 wait for each other"):
        spans(actions, lambda a: Cost(device=1.0))
