"""Lists with averaged replicas: proven equal to serial with the same averaging, labelled, and refused where they are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nestpipe.schedule import BUILDERS, build
from nestpipe.schedule.action import Action
from nestpipe.schedule.check import Proof, Violation, examine
from nestpipe.schedule.options import DEFAULT, Options

SCHEDULES = [name for name in BUILDERS if name != "semi_async"]


def options(every: int, **more: bool) -> Options:
    return replace(DEFAULT, average_every=every, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("every", [1, 2, 3, 100])
@pytest.mark.parametrize("early", [False, True])
def test_every_schedule_is_serial_with_the_same_averaging(name: str, every: int, early: bool) -> None:
    """Promise: whatever keys batches share, every read finds what serial with the same averaging has there."""
    for micros, clips in ((1, False), (3, True)):
        some = options(every, early_retrieve=early, clips=clips)
        found = examine(build(name, 6, micros, some), build("serial", 6, micros, some), average_every=every)
        assert isinstance(found, Proof), found
        assert not found.exact and found.label == "not exact, by design"
        assert f"replicas differ for up to {every} step" in str(found)


def test_exact_lists_have_no_average() -> None:
    """Promise: without averaging no list has the stage, and the proof says exact."""
    for name in SCHEDULES:
        actions = build(name, 4, 2)
        assert all(action.stage != "average" for action in actions)
        found = examine(actions, build("serial", 4, 2))
        assert isinstance(found, Proof) and found.exact and found.label == "exact"


def _moved(actions: list[Action], name: tuple[str, int, int], before: tuple[str, int, int]) -> list[Action]:
    action = next(a for a in actions if a.name == name)
    left = [a for a in actions if a.name != name]
    place = next(i for i, a in enumerate(left) if a.name == before)
    waits = tuple(w for w in action.waits if w[0] != "average")
    return [*left[:place], replace(action, waits=waits), *left[place:]]


@pytest.mark.parametrize("name", ["dbp", "nested"])
@pytest.mark.parametrize("batch", [3, 4])
def test_rows_retrieved_before_an_average_are_refused(name: str, batch: int) -> None:
    """Promise: `check` refuses a list that retrieves rows before the average that changes them."""
    some = options(3)
    actions = _moved(build(name, 6, 1, some), ("retrieve", batch, -1), ("writeback", 2, -1))
    assert isinstance(examine(actions, build("serial", 6, 1, some)), Violation)


@pytest.mark.parametrize("name", SCHEDULES[1:])
def test_an_average_before_writeback_is_refused(name: str) -> None:
    """Promise: `check` refuses an average that does not wait for the rows of its batch."""
    some = options(2)
    actions = [replace(a, waits=()) if a.stage == "average" else a for a in build(name, 4, 1, some)]
    assert isinstance(examine(actions, build("serial", 4, 1, some)), Violation)
