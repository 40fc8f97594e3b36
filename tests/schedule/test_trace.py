"""Traces open in Perfetto: named processes and threads, and actions of a lane one after another."""

from __future__ import annotations

import copy
import itertools
import json
import time
from dataclasses import replace
from typing import Any

import pytest

from nestpipe.schedule import BUILDERS, LANES, build
from nestpipe.schedule.clock import nominal, run
from nestpipe.schedule.options import DEFAULT
from nestpipe.schedule.timeline import Span
from nestpipe.schedule.view.trace import VIRTUAL, Trace, merge, problems


def events(trace: Trace, kind: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == kind]


@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("schedule", BUILDERS)
def test_a_trace_of_the_virtual_clock(schedule: str, micros: int) -> None:
    actions = build(schedule, 5, micros)
    spans = run(actions, nominal(actions))
    trace = merge([spans], unit=VIRTUAL)
    assert problems(json.loads(json.dumps(trace))) == []
    found = {event["name"]: event for event in events(trace, "X")}
    assert len(found) == len(actions)
    for span in spans:
        event = found[str(span.action)]
        assert event["ts"] == pytest.approx(span.start * 1000, abs=1e-3)
        assert event["dur"] == pytest.approx((span.stop - span.start) * 1000, abs=2e-3)
        named = {"stage": span.action.stage, "batch": span.action.batch, "micro": span.action.micro}
        assert named.items() <= event["args"].items() and set(event["args"]) <= {*named, "after"}


def test_an_action_names_what_it_waited_for() -> None:
    """What ended last of all that it came after, on its own lane or another: by the virtual clock it starts when that ends."""
    actions = build("nested", 5, 3)
    trace = merge([run(actions, nominal(actions))], unit=VIRTUAL)
    found = {event["name"]: event for event in events(trace, "X")}
    after = {name: event["args"].get("after") for name, event in found.items()}
    assert after["load 0"] is None and after["route 0"] == "move 0" and after["load 1"] == "load 0"
    waited = [name for name in after if after[name] is not None and name.startswith(("compute", "grad", "update"))]
    assert all(
        found[after[name]]["ts"] + found[after[name]]["dur"] == pytest.approx(found[name]["ts"]) for name in waited
    )


def test_a_trace_of_real_spans_of_several_workers_has_one_clock() -> None:
    """Clocks of workers begin anywhere; offsets bring them together, and the trace begins at 0."""
    actions = build("dbp", 2, 1, replace(DEFAULT, replicates=True))  # so that every lane has something
    workers = []
    for behind in (0.0, 1000.0):
        at = time.perf_counter() - behind
        workers.append([Span(action, at + i * 1e-3, at + (i + 1) * 1e-3, None) for i, action in enumerate(actions)])
    late = workers[0][0].start - workers[1][0].start
    trace = merge(workers, [0.0, late + 0.5e-3])
    assert problems(trace) == []
    first = {pid: min(e["ts"] for e in events(trace, "X") if e["pid"] == pid) for pid in (0, 1)}
    assert first[0] == 0 and first[1] == pytest.approx(500, abs=0.01)
    names = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events(trace, "M")}
    assert names["process_name", 1, 0] == {"name": "worker 1"}
    assert [names["thread_name", 1, tid]["name"] for tid in range(1, 1 + len(LANES))] == list(LANES)


def test_spans_that_touch_do_not_overlap_once_rounded() -> None:
    actions = [a for a in build("serial", 100, 1) if a.stage == "load"]
    times = [1e5 / 3 + i * 1e-6 / 7 for i in range(len(actions) + 1)]
    spans = [Span(action, *ends, None) for action, ends in zip(actions, itertools.pairwise(times))]
    assert problems(merge([spans])) == []


def test_offsets_must_be_one_per_worker() -> None:
    with pytest.raises(ValueError, match="2 workers and 1 clock offsets"):
        merge([[], []], [0.0])
    assert problems(merge([])) == [] and problems(merge([[], []])) == []


def test_what_is_wrong_with_a_trace_is_found() -> None:
    """The validator itself: each fault alone gives a line that names it."""
    actions = build("dbp", 2, 1)
    good = merge([run(actions, nominal(actions))], unit=VIRTUAL)
    first = next(i for i, event in enumerate(good["traceEvents"]) if event["ph"] == "X")
    faults = {
        "dur is None": lambda event, trace: event.pop("dur"),
        "dur is -1, below 0": lambda event, trace: event.update(dur=-1),
        "args say load 0": lambda event, trace: event.update(name="load 7"),
        "args are": lambda event, trace: event.update(args={}),
        "is not named after the lane": lambda event, trace: event.update(tid=5),
        "ph is 'B'": lambda event, trace: event.update(ph="B"),
        "load 0 and load 1 overlap": lambda event, trace: event.update(dur=event["dur"] + 0.001),
        "has no name": lambda event, trace: trace["traceEvents"].pop(0),
    }
    for line, fault in faults.items():
        trace = copy.deepcopy(good)
        fault(trace["traceEvents"][first], trace)
        found = problems(trace)
        assert found and any(line in text for text in found), (line, found)
