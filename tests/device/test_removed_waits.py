"""What keeps streams apart is removed, one thing at a time, on the simulated device: every removal is noticed.

First every wait that a list needs, as reachability on the list says (`check`); then every other guard of memory: each
`record_stream`, each wait for a copy.  A removal is noticed by other numbers, by NaN (the run stops), by the race
detector, by an error, or because the run hangs or crashes.  `pytest -s` prints the tables of removals and of who noticed.

A guard that another one happens to cover is looked at alone.  `agree` makes the host wait for the device once a step, and
the lists wait for more than `check` asks for; so memory is rarely dropped while it is still in use.  Here an adversary lets
it be dropped as early as references allow, as soon as its last reader has been issued, and lets its lane allocate then.
With the guard the run is still right, and quiet.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from nestpipe.comm.device_exchange import DeviceExchange
from nestpipe.comm.world import World
from nestpipe.config.pipeline import PipelineConfig
from nestpipe.data.batch import Batch
from nestpipe.device import sim
from nestpipe.device.accelerator import Accelerator
from nestpipe.device.one_shot_event import OneShotEvent
from nestpipe.device.staging import MOST_PENDING, Staging
from nestpipe.pipeline import TrainPipeline
from nestpipe.schedule import build
from nestpipe.schedule.action import Action, Name
from nestpipe.schedule.check import check
from nestpipe.schedule.options import Options, Workload, resolve
from nestpipe.sparse.buffers import BufferPool
from simulated import clicks, in_order, train
from workers import WorkerFailed, run

pytestmark = [pytest.mark.slow, pytest.mark.accelerator]

Wait = tuple[str, str, int]
"""Who waits, for whom, and how many batches that is before."""
Change = tuple[Any, ...]
"""A function of `CHANGES`, and its arguments: by name, so that other processes can be told."""
PATIENCE = 5.0
"""Seconds for which the adversary holds an action back if what it waits for does not come."""
DEADLINE = 40.0
"""Seconds after which a run counts as one that hangs.  Others take one or two."""
ORDERS = (("late", 0), *(("random", seed) for seed in range(1, 6)))


@dataclass(frozen=True)
class Trial:
    """A run in which a removal is noticed."""

    options: tuple[tuple[str, Any], ...] = ()
    """Of `train`."""
    workers: int = 1
    batches: str = "clicks"
    changes: tuple[Change, ...] = ()
    """Made to the pipeline, with and without the removal."""
    adversary: tuple[Change, ...] = ()
    """Made with the removal only: without it, they would wait in vain."""
    program: str = "training"
    said: str = ""
    """What is special, for the table."""

    def without(self, *removals: Change) -> Trial:
        return replace(self, changes=(*self.changes, *self.adversary, *removals), adversary=())

    def under(self, schedule: str) -> Trial:
        return replace(self, options=(("schedule", schedule), ("micro_batches", 2), *self.options))


# What is changed


def wait_of(action: Action, name: Name) -> Wait:
    return action.stage, name[0], action.batch - name[1]


def streams_do_not_wait(pipeline: TrainPipeline, wait: Wait) -> None:
    """The stream does not wait; the host's threads do, until what they wait for has been issued."""
    real = pipeline.engine._wait_for

    def wait_for(action: Action, name: Name, done: OneShotEvent | None) -> None:
        if done is not None and wait_of(action, name) == wait:
            OneShotEvent.wait(done)
        else:
            real(action, name, done)

    pipeline.engine._wait_for = wait_for  # type: ignore[method-assign]


def nobody_waits(pipeline: TrainPipeline, wait: Wait) -> None:
    real = pipeline.engine._wait_for

    def wait_for(action: Action, name: Name, done: OneShotEvent | None) -> None:
        if wait_of(action, name) != wait:
            real(action, name, done)

    pipeline.engine._wait_for = wait_for  # type: ignore[method-assign]


def hold(pipeline: TrainPipeline, held: str, until: str, later: int) -> None:
    """An adversary: lets `held` of a batch begin only when `until` of the batch `later` after it has been performed."""
    performed: dict[tuple[str, int], threading.Event] = {}

    def event(stage: str, batch: int) -> threading.Event:
        return performed.setdefault((stage, batch), threading.Event())

    def comes(batch: int) -> bool:
        """Whether the adversary may still hope for it."""
        ended = pipeline.engine._ended_at
        return batch >= 0 and pipeline.engine._failure is None and (ended is None or batch < ended)

    def before(action: Action, context: Any) -> None:
        waited, batch, give_up = action.stage == held, action.batch + later, time.monotonic() + PATIENCE
        while waited and comes(batch) and time.monotonic() < give_up:
            waited = not event(until, batch).wait(0.05)

    def after(action: Action, context: Any) -> None:
        if action.stage == until and is_last(action, context):
            event(until, action.batch).set()

    around(pipeline, before, after)


def run_at_once(pipeline: TrainPipeline, stage: str) -> None:
    """The device runs this stage, and what its stream waits for, as soon as it is issued."""

    def after(action: Action, context: Any) -> None:
        if action.stage == stage:
            pipeline.device.mark().synchronize()

    around(pipeline, lambda action, context: None, after)


def drop(pipeline: TrainPipeline, what: str, after_stage: str) -> None:
    """The context of a batch forgets `what` when its last reader, `after_stage`, has been issued."""

    def after(action: Action, context: Any) -> None:
        if action.stage == after_stage and is_last(action, context):
            setattr(context, what, [])

    around(pipeline, lambda action, context: None, after)


def drop_buffers(pipeline: TrainPipeline) -> None:
    """The context of a batch forgets its buffers when `sync` of the next and its own `writeback` have been issued."""
    contexts = pipeline._contexts

    def forget(context: Any, micro: int) -> None:
        if (old := contexts.get(context.number - 2)) is not None:
            old.buffers = []
        retrieve(context, micro)

    retrieve = pipeline.stage("retrieve")
    pipeline.replace_stages(retrieve=forget)


def weight_grad_fails(pipeline: TrainPipeline, batch: int) -> None:
    """After the last bucket of gradients was told to be final; by then `writeback` could have been performed."""
    weight_grad = pipeline.stage("weight_grad")
    writeback = pipeline.stage("writeback")
    written = threading.Event()

    def failing(context: Any, micro: int) -> None:
        weight_grad(context, micro)
        if context.number == batch:
            written.wait(2.0)
            raise ArithmeticError("weight_grad fails at its end")

    def telling(context: Any, micro: int) -> None:
        writeback(context, micro)
        if context.number == batch:
            written.set()

    pipeline.replace_stages(weight_grad=failing, writeback=telling)


def around(pipeline: TrainPipeline, before: Callable[..., None], after: Callable[..., None]) -> None:
    perform = pipeline.engine._perform

    def performing(action: Action, context: Any) -> None:
        before(action, context)
        perform(action, context)
        after(action, context)

    pipeline.engine._perform = performing  # type: ignore[method-assign]


def is_last(action: Action, context: Any) -> bool:
    return action.micro in (-1, context.micro_batches - 1)


CHANGES: dict[str, Callable[..., None]] = {
    "streams": streams_do_not_wait,
    "host": nobody_waits,
    "hold": hold,
    "run at once": run_at_once,
    "drop": drop,
    "drop buffers": drop_buffers,
    "weight_grad fails": weight_grad_fails,
}


# What is patched


def no_record_stream(patch: pytest.MonkeyPatch, place: str) -> None:
    """Memory that is allocated in a function of this name is not shared with other streams."""
    real = Accelerator._shared

    def shared(self: Accelerator, tensor: Any, lanes: Any) -> Any:
        return tensor if allocating() == place else real(self, tensor, lanes)

    patch.setattr(Accelerator, "_shared", shared)


def allocating() -> str:
    """The function that has asked an accelerator for memory."""
    frame = sys._getframe(2)
    while frame.f_code.co_name in ("empty", "upload", "<genexpr>"):
        assert frame.f_back is not None
        frame = frame.f_back
    return frame.f_code.co_name


def staging_reused_at_once(patch: pytest.MonkeyPatch) -> None:
    real = Staging.give_back
    patch.setattr(Staging, "give_back", lambda self, block, event=None: real(self, block, None))


class Passed:
    """An event that nobody has to wait for."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None: ...


def oldest_reused_at_once(patch: pytest.MonkeyPatch) -> None:
    """Where too many copies are pending, the oldest block is taken although its copy has not passed."""
    real = Staging.give_back
    patch.setattr(Staging, "give_back", lambda self, block, event=None: real(self, block, event and Passed()))


def host_reads_at_once(patch: pytest.MonkeyPatch) -> None:
    """The host does not wait until what it brings down has come."""
    real = Accelerator.mark

    def mark(self: Accelerator) -> Any:
        return Passed() if sys._getframe(1).f_code.co_name == "bring_down" else real(self)

    patch.setattr(Accelerator, "mark", mark)


def buffers_reused_at_once(patch: pytest.MonkeyPatch) -> None:
    """A row buffer is taken again although its last readers may not have run."""
    real = BufferPool.take

    def take(self: BufferPool, rows: int, holders: int) -> Any:
        for buffer in self._free:
            buffer.releases.clear()
        return real(self, rows, holders)

    patch.setattr(BufferPool, "take", take)


def collectives_used_at_once(patch: pytest.MonkeyPatch) -> None:
    """Streams do not wait for what other workers send."""

    def issue(self: DeviceExchange, collective: Any, *args: Any, sent: Any) -> None:
        self._watch.add(collective(*args, group=self.group, async_op=True))

    patch.setattr(DeviceExchange, "_issue", issue)


PATCHES: dict[str, Callable[..., None]] = {
    "record_stream": no_record_stream,
    "staging": staging_reused_at_once,
    "oldest": oldest_reused_at_once,
    "down": host_reads_at_once,
    "buffers": buffers_reused_at_once,
    "collectives": collectives_used_at_once,
}


# Runs


def a_bad_one(steps: int, rank: int) -> Iterator[Batch]:
    """The loss of the last batch is not finite."""
    for number, batch in enumerate(clicks(steps, rank)):
        assert batch.labels is not None
        yield replace(batch, labels=batch.labels * (float("nan") if number == steps - 1 else 1.0))


def growing(steps: int, rank: int) -> Iterator[Batch]:
    """No batch fits into the buffers of those before."""
    for number in range(steps):
        yield from clicks(1, rank + number, samples=4 + 3 * number, ids=12 + 8 * number)


BATCHES: dict[str, Callable[..., Iterator[Batch]]] = {"clicks": clicks, "a bad one": a_bad_one, "growing": growing}


def perform(world: World, trial: Trial, patches: tuple[Change, ...], order: str, seed: int) -> tuple[Any, list[str]]:
    """What a run leaves, and the races that were found.  An error is a result too, with what the tables hold then."""
    in_order(order, seed)
    with pytest.MonkeyPatch.context() as patch:
        for name, *args in patches:
            PATCHES[name](patch, *args)
        return PROGRAMS[trial.program](world, trial), sim.report().races


def training(world: World, trial: Trial) -> Any:
    kept: list[TrainPipeline] = []

    def change(pipeline: TrainPipeline) -> None:
        kept.append(pipeline)
        for name, *args in trial.changes:
            CHANGES[name](pipeline, *args)

    try:
        options: dict[str, Any] = {"steps": 5, **dict(trial.options)}
        return train(batches=BATCHES[trial.batches], change=change, world=world, **options).bits()
    except Exception as error:
        return type(error).__name__, [tables_of(store) for store in kept[0].stores]


def tables_of(store: Any) -> list[bytes]:
    tables, keys, slots = store.index.items()
    order = np.lexsort((keys, tables))
    return [array[order].tobytes() for array in (tables, keys, *store.read(slots))]


def uploads(world: World, trial: Trial) -> Any:
    """More than may be pending, read in the end."""
    device = Accelerator(torch.device("sim"))
    there = [device.upload([np.full(5, number)])[0] for number in range(3 * MOST_PENDING)]
    return [array.tolist() for array in there]


def sharing(world: World, trial: Trial) -> Any:
    """The functions that allocate memory which several lanes use."""
    places: set[str] = set()
    real = Accelerator._shared

    def shared(self: Accelerator, tensor: Any, lanes: Any) -> Any:
        if lanes:
            places.add(allocating())
        return real(self, tensor, lanes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accelerator, "_shared", shared)
        training(world, trial)
    return places


PROGRAMS: dict[str, Callable[[World, Trial], Any]] = {"training": training, "uploads": uploads, "sharing": sharing}


ENDS = {"were not done": "hangs", "exit_code=-": "crashes"}
"""Of runs that are not over in time, or end by a signal: a wrong index is not checked by every kernel."""


def result_of(trial: Trial, patches: tuple[Change, ...], order: str, seed: int) -> tuple[Any, list[str]]:
    try:
        ranks = run(trial.workers, perform, trial, patches, order, seed, deadline=DEADLINE)
    except WorkerFailed as error:
        ends = [word for sign, word in ENDS.items() if sign in str(error)]
        assert ends, error
        return ends[0], []
    return [result for result, _ in ranks], [race for _, races in ranks for race in races]


@cache
def right_of(trial: Trial) -> Any:
    """What the run leaves from which nothing was removed; it ends and has no race."""
    right, races = result_of(trial, (), "late", 0)
    assert right not in ENDS.values() and not races, (right, races)
    return right


def who_notices(trial: Trial, removal: Change) -> str | None:
    """Runs late, then in seeded orders, until something tells.  `removal` is one of `CHANGES` or of `PATCHES`."""
    right = right_of(replace(trial, adversary=()))
    broken, patches = (trial, (removal,)) if removal[0] in PATCHES else (trial.without(removal), ())
    for order, seed in ORDERS:
        found, races = result_of(broken, patches, order, seed)
        tells = [*(["race"] if races else []), *([difference(right, found)] if found != right else [])]
        if tells:
            how = ", ".join(filter(None, ["late" if order == "late" else f"seed {seed}", trial.said]))
            return f"{' and '.join(tells)} ({how})"
    return None


def difference(right: Any, found: Any) -> str:
    if isinstance(found, str):
        return found
    errors = [{result[0] for result in results if isinstance(result, tuple)} for results in (right, found)]
    if errors[1] != errors[0]:
        return ", ".join(sorted(errors[1]))
    return "rows of that batch in the tables" if errors[1] else "other numbers"


def show(title: str, table: dict[str, str | None]) -> None:
    print(f"\n{title}")
    for what, who in table.items():
        print(f"  {what:44} {who or 'NOT NOTICED'}")
    assert all(table.values()), [what for what, who in table.items() if not who]


# Waits

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.05},
    "early retrieve": {"early_retrieve": True},
    "undeferred": {"defer_weight_grads": False},
}
"""Options under which lists differ."""


def trial(variant: str = "plain", said: str = "", **how: Any) -> Trial:
    said = ", ".join(filter(None, [variant if variant != "plain" else "", said]))
    return Trial(options=tuple(VARIANTS[variant].items()), said=said, **how)


WAITS: dict[Wait, Trial] = {
    ("sync", "retrieve", 0): trial(),
    ("embed", "sync", 0): trial(),
    ("compute", "embed", 0): trial(),
    ("grad", "compute", 0): trial(changes=(("run at once", "grad"),), said="grad runs at once"),
    ("accumulate", "grad", 0): trial(),
    ("agree", "accumulate", 0): trial(),
    ("writeback", "update", 0): trial(),
    ("update", "agree", 0): trial("clipped"),
    ("step", "agree", 0): trial("clipped"),
    ("reduce", "weight_grad", 0): trial(workers=2, said="2 workers"),
    ("reduce", "compute", 0): trial("undeferred", workers=2, said="2 workers"),
    ("retrieve", "update", 2): trial(
        "early retrieve", changes=(("hold", "writeback", "retrieve", 2), ("hold", "agree", "retrieve", 1))
    ),
}
"""Needed waits of streams: the host's threads go on waiting until what they wait for is issued."""
HOST_WAITS: dict[Wait, Trial] = {
    ("move", "load", 0): trial(adversary=(("hold", "load", "move", 0),)),
    ("route", "move", 0): trial(adversary=(("hold", "load", "route", 0),)),
    ("retrieve", "route", 0): trial(adversary=(("hold", "route", "retrieve", 0),)),
    ("retrieve", "writeback", 2): trial(adversary=(("hold", "writeback", "retrieve", 2),)),
    ("retrieve", "writeback", 3): trial("early retrieve", adversary=(("hold", "writeback", "retrieve", 3),)),
    ("writeback", "agree", 0): trial(
        batches="a bad one", said="a batch is refused", adversary=(("hold", "agree", "writeback", 0),)
    ),
    ("agree", "weight_grad", 0): trial(said="weight_grad fails at its end", changes=(("weight_grad fails", 3),)),
}
"""Needed waits of the host's threads, because one of the two is the host's work: nobody waits, and the adversary makes what
was waited for come later.  `agree` needs `weight_grad` only to learn that it failed: `reduce` orders the gradients."""


def options_of(variant: str) -> Options:
    options = dict(VARIANTS[variant])
    workload = Workload(clips=options.pop("clip_norm", None) is not None, host_computes=False)
    return resolve(PipelineConfig().changed(**options), workload)


def needed_waits(schedule: str, options: Options) -> set[Wait]:
    """Waits without which the list is not exact, as `check` proves it."""
    reference, actions = build("serial", 5, 2, options), build(schedule, 5, 2, options)
    waits = {wait_of(action, name) for action in actions for name in action.after}
    return {wait for wait in waits if check(without(actions, wait), reference) is not None}


def without(actions: list[Action], wait: Wait) -> list[Action]:
    return [
        replace(
            action,
            waits=tuple(name for name in action.waits if wait_of(action, name) != wait),
            within=None if action.within and wait_of(action, action.within) == wait else action.within,
        )
        for action in actions
    ]


@pytest.mark.parametrize("schedule", ["dbp", "nested"])
def test_no_needed_wait_is_forgotten(schedule: str) -> None:
    """Promise: a new wait of a list is removed here as well."""
    needed = {variant: needed_waits(schedule, options_of(variant)) for variant in VARIANTS}
    assert set().union(*needed.values()) == {*WAITS, *HOST_WAITS}


def named(wait: Wait) -> str:
    waiter, waited, distance = wait
    return f"{waiter}(t) for {waited}({f't-{distance}' if distance else 't'})"


@pytest.mark.parametrize("schedule", ["dbp", "nested"])
def test_every_needed_wait_of_streams(schedule: str) -> None:
    """Promise: a missing wait is a wrong number, a NaN or a race here, not in somebody's cluster."""
    assert right_of(trial().under(schedule)) == right_of(trial().under("serial"))
    removed = {named(wait): who_notices(how.under(schedule), ("streams", wait)) for wait, how in WAITS.items()}
    show(f"{schedule}: waits of streams removed, and who noticed", removed)


@pytest.mark.parametrize("schedule", ["dbp", "nested"])
def test_every_needed_wait_of_the_host(schedule: str) -> None:
    """Promise: the same where the host does the work."""
    removed = {named(wait): who_notices(how.under(schedule), ("host", wait)) for wait, how in HOST_WAITS.items()}
    show(f"{schedule}: waits of the host removed, and who noticed", removed)


# Guards of memory

NO_WAIT_FOR_BUFFERS: Change = ("streams", ("retrieve", "sync", 1))
NO_WAIT_FOR_GRADIENTS: Change = ("streams", ("embed", "accumulate", 0))
"""Waits that `check` does not need: memory knows by itself when it is free.  Only `dbp` has the second."""
GUARDS: dict[str, tuple[Change, Trial]] = {
    "record_stream of windows": (
        ("record_stream", "_make"),
        trial(
            said="dropped after the last grad",
            changes=(("drop", "windows", "grad"), ("hold", "retrieve", "grad", -1), ("hold", "agree", "retrieve", 1)),
        ),
    ),
    "record_stream of index lists": (
        ("record_stream", "_upload_lists"),
        trial(
            said="dropped after the last accumulate",
            changes=(
                ("drop", "lists", "accumulate"),
                ("hold", "retrieve", "accumulate", -1),
                ("hold", "agree", "retrieve", 1),
            ),
        ),
    ),
    "record_stream of moved batches": (
        ("record_stream", "move_batches"),
        trial(
            said="dropped after weight_grad",
            changes=(
                ("drop", "moved", "weight_grad"),
                ("hold", "move", "weight_grad", -3),
                ("hold", "agree", "move", 3),
            ),
        ),
    ),
    "record_stream of gradients that arrive": (
        ("record_stream", "grad"),
        Trial(
            options=(("micro_batches", 4),), said="the list does not wait for them", changes=(NO_WAIT_FOR_GRADIENTS,)
        ),
    ),
    "record_stream of row buffers": (
        ("record_stream", "allocate"),
        trial(
            batches="growing",
            said="batches outgrow them, the list does not wait for them",
            changes=(NO_WAIT_FOR_BUFFERS, ("drop buffers",)),
        ),
    ),
    "wait for a released buffer": (
        ("buffers",),
        trial(said="the list does not wait for it", changes=(NO_WAIT_FOR_BUFFERS,)),
    ),
    "wait for a staging copy": (("staging",), trial()),
    "wait for the oldest of many staging copies": (("oldest",), Trial(program="uploads", said="uploads alone")),
    "wait for what was brought down": (("down",), trial()),
    "wait for a collective": (("collectives",), trial(workers=2, said="2 workers")),
}


@pytest.mark.parametrize("schedule", ["dbp", "nested"])
def test_every_guard_of_memory(schedule: str) -> None:
    """Promise: each `record_stream` and each wait for a copy is there for a reason, and is enough."""
    removed = {}
    for name, (removal, how) in GUARDS.items():
        guarded = how.under(schedule)
        plain = right_of(replace(guarded, changes=(), said=""))
        assert right_of(guarded) == plain and result_of(guarded, (), "random", 1) == (plain, []), name
        removed[name] = who_notices(guarded, removal)
    show(f"{schedule}: guards of memory removed, and who noticed", removed)


def test_no_record_stream_is_forgotten() -> None:
    """Promise: a new one is removed here as well."""
    ((places, _),) = run(1, perform, Trial(program="sharing").under("nested"), (), "late", 0)
    assert places == {place for (how, *place_of), _ in GUARDS.values() if how == "record_stream" for place in place_of}
