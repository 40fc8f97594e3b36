"""`verify`: the same recipe and seed under `serial` and under another schedule, compared bit for bit.

Both run free, at full speed and with all their overlap, one after the other; nothing is synchronised for the sake of comparing.
Where they differ, shorter runs find the step at which they part.

Replicas that are averaged (`pipeline.replicas = "average"`) are not synchronous training, so this is never called equal.  It is
compared with `serial` of the same groups and the same averaging, bit for bit, too.
A schedule that is stale by design is never called equal.  It is compared with `serial` that reads rows of the batch before as
they were before its update (`sparse.one_batch_old`): bit for bit, too, so what it does beside that shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nestpipe.checkpoint.replicas import compare_replicas
from nestpipe.comm.consistency import sum_over_workers
from nestpipe.comm.world import World
from nestpipe.config.recipe import Recipe
from nestpipe.pipeline import TrainPipeline
from nestpipe.schedule import STALE
from nestpipe.sparse.one_batch_old import OneBatchOld
from nestpipe.tables.eviction.frequency import FrequencyTable
from nestpipe.tables.keyed import KeyedRows
from nestpipe.train.build import make_pipeline, open_source, prepare_data
from nestpipe.train.digest import dense_state
from nestpipe.train.simulated import SimulatedOrders
from nestpipe.train.streams import cost_plan, train_stream

CHUNK = 1 << 16


@dataclass(frozen=True)
class Difference:
    """The first place at which two runs differ."""

    what: str
    """rows, state, usage, waiting, evicted, dense or losses."""
    table: str | None
    """Or the name of the dense tensor."""
    key: int | None
    step: int
    serial: float | None
    other: float | None
    """The two values; None where a row is missing."""

    def __str__(self) -> str:
        place = f"step {self.step}"
        if self.what in ("rows", "state", "usage", "waiting", "evicted"):
            place = f"{self.what} of key {self.key} in table {self.table!r} after {self.step} steps"
        elif self.what == "dense":
            place = f"dense tensor {self.table!r} after {self.step} steps"
        return f"{place}: serial has {self.serial!r}, the other {self.other!r}"


@dataclass
class Run:
    pipeline: TrainPipeline
    losses: list[float]
    evicted: dict[tuple[str, int], np.ndarray]
    """Keys by (table, batch)."""


def verify(
    recipe: Recipe,
    steps: int,
    world: World,
    tell: Callable[[float, str], None],
    check_staleness: bool = False,
    orders: int = 0,
    against_exact: bool = False,
) -> dict[str, Any]:
    """Compares; the same result on every worker.

    `against_exact`: with `serial` whose replicas stay equal, whatever the recipe says.
    `orders`: on the simulated device, the schedule runs in its late order and in this many seeded ones, and each is compared.
    """
    schedule = recipe.pipeline.schedule
    simulated = SimulatedOrders(orders, steps) if recipe.train.device == "sim" else None
    runs = 2 + (orders if simulated is not None else 0)

    def tell_of(run: int, name: str) -> Callable[[float], None]:
        return lambda done: tell((run + done) / runs, f"{name}, step {done * steps:.0f}")

    if simulated is not None:
        simulated.begin_late()
    other = _run(recipe, steps, world, tell_of(0, schedule), check_staleness, simulated)
    chosen = [list(choice) for choice in other.pipeline.micro_batch_choices]  # what "auto" has chosen is given back
    recipe = replace(recipe, pipeline=replace(recipe.pipeline, micro_batches=chosen))
    if (
        recipe.tables.ttl_minutes is not None and recipe.tables.ttl_horizons is None
    ):  # and so is what the clock has said
        horizons = [list(pair) for pair in other.pipeline.ttl_horizons()]
        recipe = replace(recipe, tables=replace(recipe.tables, ttl_horizons=horizons))
    stale = schedule in STALE
    reference = _with(recipe, "serial", **({"replicas": "exact"} if against_exact else {}))
    inexact = other.pipeline.inexact if not against_exact else None
    serial = _run(reference, steps, world, tell_of(1, "serial"), one_batch_old=stale)
    compared = {
        "rows": _total(serial, lambda store: len(store)),
        "state": _total(serial, lambda store: len(store) * store.group.optimizer_width),
        "evicted": sum(serial.pipeline.total_evicted().values()),
        "dense": sum(1 for _ in dense_state(serial.pipeline)),
        "losses": len(serial.losses),
    }
    difference = _first_difference(serial, other, world)
    reads = sum_over_workers(world, other.pipeline.figures()["row_reads"]) if stale else {}
    other.pipeline.close()
    if simulated is not None:
        for number, order in enumerate(simulated.seeded(), start=2):
            if difference is None:
                again = _run(recipe, steps, world, tell_of(number, f"{schedule}, {order}"), check_staleness, simulated)
                difference = _first_difference(serial, again, world)
                again.pipeline.close()
    serial.pipeline.close()
    if difference is not None and difference.what != "losses" and simulated is None:
        difference = replace(difference, step=_parting_step(recipe, reference, difference.step, world, tell))
    return {
        "equal": difference is None and inexact is None and not stale,
        **({"as_designed": difference is None, "inexact": inexact} if inexact is not None else {}),
        **({"as_designed": difference is None, "row_reads": reads} if stale else {}),
        "schedule": schedule,
        "workers": world.size,
        **({"group_size": size} if (size := serial.pipeline.topology.shard.size) < world.size else {}),
        "micro_batches": chosen[0][1] if len(chosen) == 1 else chosen,
        "steps": len(serial.losses),
        "compared": compared,
        **({"simulated": simulated.figures()} if simulated is not None else {}),
        "first_difference": None if difference is None else {**asdict(difference), "text": str(difference)},
    }


def _with(recipe: Recipe, schedule: str, **knobs: Any) -> Recipe:
    return replace(recipe, pipeline=recipe.pipeline.changed(schedule=schedule, **knobs))


def _run(
    recipe: Recipe,
    steps: int,
    world: World,
    tell: Callable[[float], None],
    check_staleness: bool = False,
    simulated: SimulatedOrders | None = None,
    one_batch_old: bool = False,
) -> Run:
    torch.set_num_threads(recipe.train.threads)
    prepare_data(recipe, world)
    source = open_source(recipe, "train", world)
    pipeline = make_pipeline(recipe, source, world, check_staleness=check_staleness)
    if one_batch_old:
        old = OneBatchOld(pipeline.stage("embed"), pipeline.stage("update"), pipeline.device)
        pipeline.replace_stages(embed=old.embed, update=old.update)
    costs = cost_plan(recipe, pipeline.model, fitted=False)  # what steps take would not be the same twice
    stream = train_stream(replace(recipe, train=replace(recipe.train, steps=steps)), source, world, costs=costs)
    losses: list[float] = []
    if simulated is not None:
        simulated.begin()
    while len(losses) < steps and (step := pipeline.progress(stream)):
        losses.append(step.loss)
        tell(len(losses) / steps)
    pipeline.unite()
    if simulated is not None:
        simulated.note()
    stream.close()
    compare_replicas(pipeline, f"after {len(losses)} steps of {recipe.pipeline.schedule}")
    return Run(pipeline, losses, {(e.table, e.batch): e.keys for e in pipeline.take_evicted()})


def _first_difference(serial: Run, other: Run, world: World) -> Difference | None:
    """Of all workers: losses first, then tables by name and key, then dense tensors by name."""
    mine = (
        _loss_difference(serial, other)
        or _row_difference(serial, other)
        or _eviction_difference(serial, other)
        or _dense_difference(serial, other)
    )
    if world.size == 1:
        return mine
    everyone: list[Difference | None] = [None] * world.size
    dist.all_gather_object(everyone, mine, group=world.groups["metrics"])
    found = [d for d in everyone if d is not None]
    order = {"losses": 0, "rows": 1, "state": 2, "usage": 3, "waiting": 4, "evicted": 5, "dense": 6}
    return min(found, key=lambda d: (order[d.what], d.step, d.table or "", d.key or 0)) if found else None


def _loss_difference(serial: Run, other: Run) -> Difference | None:
    for step, (a, b) in enumerate(zip(serial.losses, other.losses, strict=False)):
        if np.float64(a).tobytes() != np.float64(b).tobytes():
            return Difference("losses", None, None, step, a, b)
    if len(serial.losses) != len(other.losses):
        step = min(len(serial.losses), len(other.losses))
        return Difference(
            "losses", None, None, step, *(r.losses[step] if len(r.losses) > step else None for r in (serial, other))
        )
    return None


def _row_difference(serial: Run, other: Run) -> Difference | None:
    steps = len(serial.losses)
    names = sorted(t.name for store in serial.pipeline.stores for t in store.group.tables)
    for name in names:
        g, number = serial.pipeline.place_of(name)
        a, b = serial.pipeline.stores[g], other.pipeline.stores[g]
        (a_keys, a_slots), (b_keys, b_slots) = a.rows_of(number), b.rows_of(number)
        if not np.array_equal(a_keys, b_keys):
            return _lone_key("rows", name, steps, a_keys, b_keys)
        width = a.group.optimizer_width
        for at in range(0, len(a_keys), CHUNK):
            (a_values, a_state), (b_values, b_state) = (
                a.read(a_slots[at : at + CHUNK]),
                b.read(b_slots[at : at + CHUNK]),
            )
            pairs = [("rows", a_values, b_values), ("state", a_state[:, :width], b_state[:, :width])]
            if a.group.eviction is not None:
                left, right = (a.group.eviction_columns(state).astype(np.float64) for state in (a_state, b_state))
                pairs.append(("usage", left, right))
            for what, left, right in pairs:
                found = _unequal(left, right)
                if found is not None:
                    i, j = found
                    return Difference(what, name, int(a_keys[at + i]), steps, float(left[i, j]), float(right[i, j]))
        if a.frequencies is not None and b.frequencies is not None:
            waiting = _waiting_difference(a.frequencies, b.frequencies, number, name, steps)
            if waiting is not None:
                return waiting
    return None


def _waiting_difference(a: FrequencyTable, b: FrequencyTable, number: int, name: str, steps: int) -> Difference | None:
    """In what is known of keys that have no row yet."""
    (a_keys, a_slots), (b_keys, b_slots) = a.rows_of(number), b.rows_of(number)
    if not np.array_equal(a_keys, b_keys):
        return _lone_key("waiting", name, steps, a_keys, b_keys)
    left, right = (s.read(slots)[0].astype(np.float64) for s, slots in ((a, a_slots), (b, b_slots)))
    found = _unequal(left, right)
    if found is None:
        return None
    i, j = found
    return Difference("waiting", name, int(a_keys[i]), steps, float(left[i, j]), float(right[i, j]))


def _eviction_difference(serial: Run, other: Run) -> Difference | None:
    """In who was evicted, and when."""
    lists = [serial.evicted, other.evicted]
    nobody = np.empty(0, np.int64)
    for table, batch in sorted({*lists[0], *lists[1]}):
        a_keys, b_keys = (found.get((table, batch), nobody) for found in lists)
        if not np.array_equal(a_keys, b_keys):
            return _lone_key("evicted", table, batch, a_keys, b_keys)
    return None


def _lone_key(what: str, table: str, steps: int, a_keys: np.ndarray, b_keys: np.ndarray) -> Difference:
    """A key that only one of them has."""
    lone = int(np.setxor1d(a_keys, b_keys)[0])
    return Difference(what, table, lone, steps, *(0.0 if lone in keys else None for keys in (a_keys, b_keys)))


def _unequal(left: np.ndarray, right: np.ndarray) -> tuple[int, int] | None:
    """The first place whose bits differ."""
    bits = np.int64 if left.dtype.itemsize == 8 else np.int32
    different = np.argwhere(np.ascontiguousarray(left).view(bits) != np.ascontiguousarray(right).view(bits))
    return (int(different[0][0]), int(different[0][1])) if len(different) else None


def _dense_difference(serial: Run, other: Run) -> Difference | None:
    from_other = dict(dense_state(other.pipeline))
    for name, tensor in sorted(dense_state(serial.pipeline), key=lambda item: item[0]):
        left, right = tensor.detach().cpu().flatten(), from_other[name].detach().cpu().flatten()
        raw = [t.contiguous().view(torch.uint8).view(t.numel(), -1) for t in (left, right)]
        different = (raw[0] != raw[1]).any(dim=1).nonzero()
        if len(different):
            i = int(different[0])
            return Difference("dense", name, None, len(serial.losses), float(left[i]), float(right[i]))
    return None


def _total(run: Run, count: Callable[[KeyedRows], int]) -> int:
    """Over the stores of all workers, those of replicas once."""
    pipeline = run.pipeline
    mine = sum(map(count, pipeline.stores)) if pipeline.topology.replicas.counts else 0
    return sum_over_workers(pipeline.world, {"all": mine})["all"]


def _parting_step(
    recipe: Recipe, reference: Recipe, steps: int, world: World, tell: Callable[[float, str], None]
) -> int:
    """The least number of steps after which the two differ; `steps` where shorter runs do not show it again."""
    low, high = 0, steps
    while high - low > 1:
        middle = (low + high) // 2
        tell(1.0, f"differs; looking for the step, {middle} of {steps}")
        stale = recipe.pipeline.schedule in STALE
        serial = _run(reference, middle, world, lambda done: None, one_batch_old=stale)
        other = _run(recipe, middle, world, lambda done: None)
        same = _first_difference(serial, other, world) is None
        serial.pipeline.close()
        other.pipeline.close()
        low, high = (middle, high) if same else (low, middle)
    return high
