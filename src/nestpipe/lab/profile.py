"""`profile`: a recipe in short turns under several schedules and without some of its work, for about as long as it is given.

One pipeline is alive at a time, built anew for every turn with the recipe's seed; tables go from turn to turn, so that memory is
that of training and lookups find rows.  Turns go forth and back through the variants, so that noise and growing tables meet all
alike.  Data is only read, and begins again where it ends.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nestpipe.comm.world import World
from nestpipe.config.micro_batches import AUTO
from nestpipe.config.recipe import Recipe
from nestpipe.data.source import DataError
from nestpipe.data.stream import Stream
from nestpipe.lab.advice import GROUPS, Disk, Figures, Variant, advise
from nestpipe.lab.limits import leave_out, leave_out_tables
from nestpipe.pipeline.pipeline import TrainPipeline
from nestpipe.sparse.batch_context import BatchContext
from nestpipe.tables.disk.tiered_store import TieredRowStore
from nestpipe.tables.keyed import KeyedRows
from nestpipe.train.build import NO_SAMPLES, make_pipeline, open_source

WARM_STEPS = 5
"""Of a turn, not counted: lanes fill, caches hold another variant's data."""
LEAST_STEPS, MOST_STEPS = 4, 20
"""Counted steps of a turn."""
ROUNDS_WANTED, LEAST_ROUNDS = 8, 3
FILLING_SHARE = 0.1
"""Of the time, for steps that only fill tables."""
TRIED = (4, 8)
"""Micro-batches that are tried where a recipe has one, or "auto"."""


@dataclass(frozen=True)
class Plan:
    """A variant that is to be measured."""

    schedule: str
    micro_batches: int
    only: str | None = None

    @property
    def name(self) -> str:
        return f"{self.only} alone" if self.only else f"{self.schedule} N={self.micro_batches}"


@dataclass
class Turn:
    """What one turn of a variant showed on one worker."""

    step_s: list[float]
    stages: dict[str, dict[str, float]]
    samples: float
    bytes_sent: float
    touched: float
    """Rows of this worker's shard a step, as all below."""
    new: float
    read: float
    written: float


def plans(recipe: Recipe, workers: int) -> tuple[list[Plan], list[Plan], str | None]:
    """What to measure; which of it is the recipe as it stands (several where it says "auto"); what a user should know of that."""
    wanted, schedule, note = recipe.pipeline.micro_batches, recipe.pipeline.schedule, None
    tried = [n for n in TRIED if n <= recipe.train.batch_size] or [1]
    count = 1
    if wanted == AUTO:
        own = [Plan(schedule, n) for n in tried]
        fixed = " and ".join(map(str, tried))
        note = f'pipeline.micro_batches = "auto" chooses while it trains: measured with {fixed} instead'
    elif isinstance(wanted, int):
        count = wanted
        own = [Plan(schedule, count)]
    else:
        assert not isinstance(wanted, str)
        count = wanted[-1][1]
        own = [Plan(schedule, count)]
        note = f"pipeline.micro_batches is a list: measured with its last entry, {count}"
    found = [*own, Plan("serial", count), Plan("serial", 1)]
    if workers > 1:
        found += [Plan("nested", n) for n in ([count] if count > 1 else tried)]
    if workers == 1 or count == 1:  # otherwise `nested` shows what looking ahead brings
        found.append(Plan("dbp", count))
    # one thing after another, so that nothing is in the way of what is measured
    found.append(Plan("serial", count, "compute"))
    if workers > 1:
        found.append(Plan("serial", count, "wire"))
    return list(dict.fromkeys(found)), own, note


def profile(recipe: Recipe, seconds: float, world: World, tell: Callable[[float, str], None]) -> dict[str, Any]:
    """Measures and advises; the same result on every worker."""
    torch.set_num_threads(recipe.train.threads)
    lab = _Lab(recipe, world)
    wanted, own, note = plans(recipe, world.size)
    begin = time.perf_counter()
    tell(0.0, f"{own[0].name}, first steps")
    build_s, step_s = lab.first_steps(own[0])  # which may have to compile: the time begins behind them
    gc.freeze()  # what is loaded by now is not to be looked through after every turn
    watch = _Watch(seconds, world, time.perf_counter() - begin)
    step_s, build_s = watch.agree(step_s), watch.agree(build_s)
    filling = int(FILLING_SHARE * seconds / step_s)
    if filling > WARM_STEPS:
        tell(0.0, f"{own[0].name}, filling tables")
        lab.turn(own[0], filling - 1, 1)
    left = seconds - watch.agree(watch.elapsed())
    of_a_turn = left / ROUNDS_WANTED / len(wanted) - build_s
    steps = min(MOST_STEPS, max(LEAST_STEPS, int(of_a_turn / step_s) - WARM_STEPS))
    watch.expect(len(wanted) * (build_s + (WARM_STEPS + steps) * step_s))

    rounds: list[dict[Plan, Turn]] = []
    while watch.another_round(len(rounds)):
        order = wanted if len(rounds) % 2 == 0 else wanted[::-1]
        taken = {}
        for plan in order:
            tell(watch.fraction(), f"round {len(rounds) + 1}, {plan.name}")
            taken[plan] = lab.turn(plan, WARM_STEPS, steps)
        rounds.append(taken)
    took = watch.agree(watch.elapsed())
    notes = [note] if note else []
    epochs = int(watch.agree(float(lab.stream.position.epoch)))
    if epochs:
        notes.append(f"the data ended and was begun again {epochs} time" + "s" * (epochs > 1))
    if len(rounds) < LEAST_ROUNDS:
        notes.append(f"only {len(rounds)} round{'s' * (len(rounds) > 1)} in {took:.0f} s: more --seconds tell more")
    everyone = _gathered(world, (rounds, sum(len(store) for store in lab.tables)))
    lab.close()
    gc.unfreeze()
    figures = _figures(recipe, world, wanted, own, [r for r, _ in everyone], max(rows for _, rows in everyone))
    return _result(recipe, figures, everyone[0][0], notes, took, steps)


class _Watch:
    """The time that is left, as all workers agree on it."""

    def __init__(self, seconds: float, world: World, before: float) -> None:
        self._seconds, self._world, self._before = seconds, world, before
        self._begin = time.perf_counter()
        self._round_s = 0.0
        self._total_s = seconds
        self._rounds_began = 0.0

    def elapsed(self) -> float:
        return time.perf_counter() - self._begin

    def fraction(self) -> float:
        """Of all that has to be waited for, with the seconds before this watch began."""
        return min(0.99, (self._before + self.elapsed()) / (self._before + self._total_s))

    def expect(self, round_s: float) -> None:
        self._rounds_began = self.agree(self.elapsed())
        self._round_s = round_s

    def another_round(self, rounds: int) -> bool:
        """Whole rounds only.  At least three, which can be sure of something, unless that took twice the time that was given."""
        now = self.agree(self.elapsed())
        if rounds:
            self._round_s = (now - self._rounds_began) / rounds
        if rounds == 0:
            self._total_s = max(self._seconds, now + self._round_s)
            return True
        end = now + self._round_s
        go_on = end <= self._seconds or (rounds < LEAST_ROUNDS and end <= 2 * self._seconds)
        self._total_s = max(self._seconds, end) if go_on else now
        return go_on

    def agree(self, value: float) -> float:
        """The most of all workers."""
        if self._world.size == 1:
            return value
        most = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._world.groups["metrics"])
        return float(most)


class _Lab:
    """Runs turns on one worker."""

    def __init__(self, recipe: Recipe, world: World) -> None:
        self._recipe, self._world = recipe, world
        self._source = open_source(recipe, "train", world)
        self.stream = Stream(self._source, recipe.train.batch_size, rank=world.rank, workers=world.size, epochs=None)
        self.tables: list[KeyedRows] = []

    def first_steps(self, plan: Plan) -> tuple[float, float]:
        """Compiles what has to be compiled.  Seconds that a pipeline takes to build, and a step."""
        self.turn(plan, 1, 1)
        begin = time.perf_counter()
        turn = self.turn(plan, WARM_STEPS, 3)
        step = statistics.median(turn.step_s)
        return max(0.0, time.perf_counter() - begin - (WARM_STEPS + 3) * step), step

    def turn(self, plan: Plan, warm: int, steps: int) -> Turn:
        pipeline = self._build(plan)
        counts = _counting(pipeline)
        for _ in range(warm):
            self._step(pipeline)
        pipeline.timeline.restart()
        before = (pipeline.traffic.bytes_sent, *counts, *self._disk_rows())
        step_s, samples = [], 0
        last = time.perf_counter()
        for _ in range(steps):
            samples += self._step(pipeline)
            now = time.perf_counter()
            step_s.append(now - last)
            last = now
        stages = pipeline.timeline.report()
        after = (pipeline.traffic.bytes_sent, *counts, *self._disk_rows())
        pipeline.settle()
        if plan.only is None:
            pipeline.replace_stores([])  # the tables stay for the next turn
        pipeline.close()
        del pipeline
        gc.collect()  # lanes and stages know one another: without it the next pipeline would be built beside this one
        sent, touched, new, read, written = ((b - a) / steps for a, b in zip(before, after))
        return Turn(step_s, stages, samples / steps, sent, touched, new, read, written)

    def close(self) -> None:
        self.stream.close()
        for store in self.tables:
            store.close()

    def _build(self, plan: Plan) -> TrainPipeline:
        section = self._recipe.pipeline.changed(schedule=plan.schedule, micro_batches=plan.micro_batches)
        pipeline = make_pipeline(replace(self._recipe, pipeline=section), self._source, self._world, empty=True)
        if plan.only is not None:
            leave_out(pipeline, plan.only)
            leave_out_tables(pipeline)
        elif self.tables:
            for store in pipeline.replace_stores(self.tables):
                store.close()
        else:
            self.tables = list(pipeline.stores)
        return pipeline

    def _step(self, pipeline: TrainPipeline) -> int:
        step = pipeline.progress(self.stream)
        if step is None:
            raise DataError(NO_SAMPLES)
        return step.samples

    def _disk_rows(self) -> tuple[int, int]:
        logs = [store.disk for store in self.tables if isinstance(store, TieredRowStore)]
        return sum(log.rows_read for log in logs), sum(log.rows_written for log in logs)


def _counting(pipeline: TrainPipeline) -> list[int]:
    """Counts, from now on, rows that are retrieved, and those of them that are new."""
    counts, retrieve = [0, 0], pipeline.stage("retrieve")

    def counted(context: BatchContext, micro: int) -> None:
        retrieve(context, micro)
        counts[0] += sum(len(found.slots) for found in context.found)
        counts[1] += sum(int(np.count_nonzero(found.slots < 0)) for found in context.found)

    pipeline.replace_stages(retrieve=counted)
    return counts


def _gathered(world: World, mine: Any) -> list[Any]:
    if world.size == 1:
        return [mine]
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, mine, group=world.groups["metrics"])
    return everyone


def _figures(
    recipe: Recipe, world: World, wanted: list[Plan], own: list[Plan], ranks: list[list[dict[Plan, Turn]]], rows: int
) -> Figures:
    variants = {plan: _variant(plan, [[taken[plan] for taken in rounds] for rounds in ranks]) for plan in wanted}
    mine = min(own, key=lambda plan: variants[plan].step_ms)
    counts = (mine.micro_batches, 1)
    serial = next(p for p in wanted if p.schedule == "serial" and p.only is None and p.micro_batches in counts)
    storage = [
        statistics.median(_sum(taken[serial].stages, (stage,), "busy_ms") for taken in rounds)
        for rounds in ranks
        for stage in GROUPS["lookup"]
    ]
    compute = [
        statistics.median(_sum(taken[mine].stages, GROUPS["compute"], "busy_ms") for taken in rounds)
        for rounds in ranks
    ]
    turns = [taken[mine] for rounds in ranks for taken in rounds]
    disk = None
    if recipe.tables.disk_path is not None:
        read, written = (statistics.fmean(getattr(turn, what) for turn in turns) for what in ("read", "written"))
        disk = Disk(recipe.tables.dram_rows or 1, rows, read, written)
    on_machine = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    return Figures(
        list(variants.values()),
        mine.name,
        workers=world.size,
        machines=math.ceil(world.size / on_machine),
        threads=recipe.train.threads,
        cores=max(1, len(os.sched_getaffinity(0)) // on_machine),
        storage_ms=max(storage),
        disk=disk,
        new_rows=sum(turn.new for turn in turns) / max(1.0, sum(turn.touched for turn in turns)),
        compute_by_worker=compute,
    )


LIMITS = {"compute": ("compute",), "wire": ("All2All", "all-reduce")}
"""What counts of a step that does only this."""


def _variant(plan: Plan, ranks: list[list[Turn]]) -> Variant:
    """Of all turns, by worker."""
    counted = LIMITS[plan.only] if plan.only else tuple(GROUPS)
    round_ms = [max(_middle_step(turn, counted) for turn in turns) for turns in zip(*ranks)]
    every = [turn for turns in ranks for turn in turns]
    step = statistics.median(round_ms)
    exposed, busy = (
        {group: statistics.fmean(_sum(turn.stages, GROUPS[group], kind) for turn in every) for group in counted}
        for kind in ("exposed_ms", "busy_ms")
    )
    # The middle step and not the mean one, which a single stall moves: shares are those of all steps.
    scale = step / max(1e-9, sum(exposed.values()))
    exposed = {group: exposed.get(group, 0.0) * scale for group in GROUPS}
    samples = 1e3 * statistics.fmean(turn.samples for turn in every) / max(step, 1e-9)
    return Variant(plan.name, plan.schedule, plan.micro_batches, round_ms, plan.only, samples, exposed, busy)


def _middle_step(turn: Turn, groups: Sequence[str]) -> float:
    """Milliseconds of the middle step of a turn, for which these groups were exposed."""
    every = sum(stage["exposed_ms"] for stage in turn.stages.values())
    counted = sum(_sum(turn.stages, GROUPS[group], "exposed_ms") for group in groups)
    return 1e3 * statistics.median(turn.step_s) * counted / max(1e-9, every)


def _sum(stages: dict[str, dict[str, float]], names: tuple[str, ...], kind: str) -> float:
    return sum(stages[name][kind] for name in names if name in stages)


def _result(
    recipe: Recipe,
    figures: Figures,
    rounds: list[dict[Plan, Turn]],
    notes: list[str],
    took: float,
    steps: int,
) -> dict[str, Any]:
    advice = advise(figures)
    sent = {plan.name: statistics.fmean(taken[plan].bytes_sent for taken in rounds) for plan in rounds[0]}
    variants = [
        {
            "name": v.name,
            "own": v.name == figures.own,
            "schedule": v.schedule,
            "micro_batches": v.micro_batches,
            "only": v.only,
            "step_ms": v.step_ms,
            "spread_ms": list(v.spread_ms),
            "round_ms": list(v.round_ms),
            "samples_per_s": v.samples_per_s,
            "exposed_ms": dict(v.exposed),
            "busy_ms": dict(v.busy),
            "bytes_sent": sent[v.name],
        }
        for v in figures.variants
    ]
    return {
        "recipe": recipe.name,
        "workers": figures.workers,
        "machines": figures.machines,
        "seconds": took,
        "rounds": len(rounds),
        "steps_per_turn": steps,
        "own": figures.own,
        "variants": variants,
        "limits_ms": figures.limits(figures.named(figures.own)),
        "storage_ms": figures.storage_ms,
        "disk": None if figures.disk is None else asdict(figures.disk),
        "new_rows": figures.new_rows,
        "compute_ms_by_worker": list(figures.compute_by_worker),
        "notes": notes,
        "outcome": advice.outcome,
        "changes": [asdict(change) for change in advice.changes],
    }
