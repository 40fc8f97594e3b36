"""Every wait that a list needs is removed in turn on the simulated device, and so is every other guard of memory.

A removal is noticed by another result, by NaN (the run stops), by the race detector, or by a fault.  The table of removals and
of who noticed each is printed (`pytest -s`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from nestpipe.device import sim
from nestpipe.device.accelerator import Accelerator
from nestpipe.device.one_shot_event import OneShotEvent
from nestpipe.device.staging import Staging
from nestpipe.engine.interpreter import Engine
from nestpipe.pipeline import TrainPipeline
from nestpipe.schedule import build
from nestpipe.schedule.action import Action, Name
from nestpipe.schedule.check import check
from nestpipe.schedule.options import Options
from simulated import Trained, in_order, train

Wait = tuple[str, str, int]
"""Who waits, for whom, and how many batches that is before."""
PATIENCE = 0.3
SEEDS = (1, 2, 3, 4, 5, 6)


def wait_of(action: Action, name: Name) -> Wait:
    return action.stage, name[0], action.batch - name[1]


def needed_waits(schedule: str, micros: int, options: Options) -> list[Wait]:
    """Waits without which the list is not exact, as `check` proves it."""
    reference, actions = build("serial", 5, micros, options), build(schedule, 5, micros, options)
    waits = dict.fromkeys(
        wait_of(action, name)
        for action in actions
        for name in (*action.waits, *([action.within] if action.within else []))
    )
    return [wait for wait in waits if check(without(actions, wait), reference) is not None]


def without(actions: list[Action], wait: Wait) -> list[Action]:
    return [
        replace(
            action,
            waits=tuple(name for name in action.waits if wait_of(action, name) != wait),
            within=None if action.within and wait_of(action, action.within) == wait else action.within,
        )
        for action in actions
    ]


def of_the_streams(wait: Wait) -> Callable[[TrainPipeline], None]:
    """The stream does not wait; the host's threads do."""

    def change(pipeline: TrainPipeline) -> None:
        real = Engine._wait_for

        def wait_for(action: Action, name: Name, done: OneShotEvent | None) -> None:
            if done is not None and wait_of(action, name) == wait:
                OneShotEvent.wait(done)
            else:
                real(action, name, done)

        pipeline.engine._wait_for = wait_for  # type: ignore[method-assign]

    return change


def of_the_host(wait: Wait) -> Callable[[TrainPipeline], None]:
    """Nobody waits, and what was waited for comes later if it can: an adversary holds it back for a moment."""

    def change(pipeline: TrainPipeline) -> None:
        real, perform = Engine._wait_for, pipeline.engine._perform
        begun: dict[Name, threading.Event] = {}
        lock = threading.Lock()

        def event_of(stage: str, batch: int) -> threading.Event:
            with lock:
                return begun.setdefault((stage, batch, 0), threading.Event())

        def wait_for(action: Action, name: Name, done: OneShotEvent | None) -> None:
            if wait_of(action, name) != wait:
                real(action, name, done)

        def held(action: Action, context: Any) -> None:
            waiter, waited, distance = wait
            if action.stage == waited:
                event_of(waiter, action.batch + distance).wait(PATIENCE)
            perform(action, context)
            if action.stage == waiter:
                event_of(waiter, action.batch).set()

        pipeline.engine._wait_for = wait_for  # type: ignore[method-assign]
        pipeline.engine._perform = held  # type: ignore[method-assign]

    return change


def who_notices(right: Trained, change: Callable[[TrainPipeline], None], options: dict[str, Any]) -> str | None:
    """Runs late, then in seeded orders, until something tells."""
    for order, seed in (("late", 0), *(("random", seed) for seed in SEEDS)):
        in_order(order, seed)
        how = "late" if order == "late" else f"seed {seed}"
        try:
            found = train(change=change, **options)
        except Exception as error:
            return f"{type(error).__name__}, {how}"
        if sim.report().races:
            return f"race, {how}"
        if not found.same(right):
            return f"other numbers, {how}"
    return None


def show(title: str, table: dict[str, str | None]) -> None:
    print(f"\n{title}")
    for what, who in table.items():
        print(f"  {what:44} {who or 'NOT NOTICED'}")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["dbp", "nested"])
def test_every_needed_wait(schedule: str) -> None:
    """Promise: a missing wait is a wrong number, a NaN or a race here, not in somebody's cluster."""
    options: dict[str, Any] = {"schedule": schedule, "micro_batches": 2}
    in_order("late")
    right = train(schedule="serial", micro_batches=2)
    resolved: list[Options] = []
    assert train(change=lambda pipeline: resolved.append(pipeline.options), **options).same(right)
    table: dict[str, str | None] = {}
    for wait in needed_waits(schedule, 2, resolved[0]):
        waiter, waited, distance = wait
        what = f"{waiter}(t) for {waited}({f't-{distance}' if distance else 't'})"
        who = who_notices(right, of_the_streams(wait), options)
        if who is None and (who := who_notices(right, of_the_host(wait), options)) is not None:
            who += " (of the host: its streams are ordered by other waits)"
        table[what] = who
    show(f"{schedule}: waits removed, and who noticed", table)
    assert len(table) > 10 and all(table.values()), {what for what, who in table.items() if not who}


def without_record_stream(place: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Memory that is allocated in a function of this name is not shared with other streams."""

    def change(patch: pytest.MonkeyPatch) -> None:
        real = Accelerator._shared

        def shared(self: Accelerator, tensor: Any, lanes: Any) -> Any:
            import sys

            frame, names = sys._getframe(1), []
            for _ in range(4):
                names.append(frame.f_code.co_name)
                frame = frame.f_back  # type: ignore[assignment]
            return tensor if place in names else real(self, tensor, lanes)

        patch.setattr(Accelerator, "_shared", shared)

    return change


def staging_reused_at_once(patch: pytest.MonkeyPatch) -> None:
    real = Staging.give_back
    patch.setattr(Staging, "give_back", lambda self, block, event=None: real(self, block, None))


def host_reads_at_once(patch: pytest.MonkeyPatch) -> None:
    """The host does not wait until what it brings down has come."""

    class Never:
        def synchronize(self) -> None: ...

    real = Accelerator.mark

    def mark(self: Accelerator) -> Any:
        import sys

        return Never() if sys._getframe(1).f_code.co_name == "bring_down" else real(self)

    patch.setattr(Accelerator, "mark", mark)


def buffers_reused_at_once(patch: pytest.MonkeyPatch) -> None:
    """A row buffer is taken again although its last readers may not have run."""
    from nestpipe.sparse.buffers import BufferPool

    real = BufferPool.take

    def take(self: BufferPool, rows: int, holders: int) -> Any:
        for buffer in self._free:
            buffer.releases.clear()
        return real(self, rows, holders)

    patch.setattr(BufferPool, "take", take)


GUARDS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "record_stream of windows": without_record_stream("_make"),
    "record_stream of index lists": without_record_stream("_upload_lists"),
    "record_stream of moved batches": without_record_stream("move_batches"),
    "record_stream of rows that leave": without_record_stream("_leaving"),
    "record_stream of gradients that arrive": without_record_stream("grad"),
    "wait for a staging copy": staging_reused_at_once,
    "wait for what was brought down": host_reads_at_once,
    "wait for a released buffer": buffers_reused_at_once,
}


@pytest.fixture
def patches() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.slow
@pytest.mark.parametrize("guard", GUARDS)
def test_every_guard_of_memory(guard: str, patches: pytest.MonkeyPatch) -> None:
    """Promise: each `record_stream` and each wait for a staging copy is there for a reason."""
    options: dict[str, Any] = {"schedule": "nested", "micro_batches": 3, "steps": 8}
    in_order("late")
    right = train(**options)
    GUARDS[guard](patches)
    who = who_notices(right, lambda pipeline: None, options)
    show("guards of memory removed, and who noticed", {guard: who})
    assert who is not None
