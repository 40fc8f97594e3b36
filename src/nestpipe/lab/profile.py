"""`profile`: measures a recipe in short turns: as it stands, under other schedules, and with part of its work left out.

One pipeline exists at a time.  Every turn builds a new one from the recipe's seed and keeps the tables for the next, so
that memory is that of training and lookups find rows.  Rounds go through the variants forth and back, so that noise and
growing tables affect all of them.  Data starts again when it ends.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nestpipe.comm.world import World
from nestpipe.config.micro_batches import AUTO
from nestpipe.config.recipe import Recipe
from nestpipe.data.shares import SharedStream
from nestpipe.data.source import DataError
from nestpipe.device.launches import waits_in_words
from nestpipe.lab.advice import STORAGE, MeasuredVariant, ProfileFigures, Variant, advise
from nestpipe.lab.limits import leave_out, leave_out_tables
from nestpipe.lab.summary import spread
from nestpipe.pipeline.pipeline import TrainPipeline
from nestpipe.schedule.parts import divide
from nestpipe.schedule.stages import STAGES
from nestpipe.tables.keyed import KeyedRows
from nestpipe.train.build import NO_SAMPLES, make_pipeline, open_source, prepare_data

WARM_STEPS = 5
"""Steps at the start of a turn that are not counted: lanes fill, and caches hold another variant's data."""
LEAST_STEPS, MOST_STEPS = 4, 20
"""Counted steps of a turn."""
ROUNDS_WANTED, LEAST_ROUNDS = 8, 3
TRIED = (4, 8)
"""Micro-batches to try if the recipe has one, or "auto"."""
LIMITS = {"compute": ("compute",), "wire": ("all2all", "dense")}
"""Shares of the step that count if it does only this."""


@dataclass
class Turn:
    """One turn of a variant on one worker; all figures are per step."""

    exposed: dict[str, float]
    """Milliseconds by stage; they add up to the median step, which a single stall does not move."""
    storage_ms: float
    """Busy: the longer of retrieve and writeback."""
    samples: float
    bytes_sent: float


def variants(recipe: Recipe, workers: int) -> tuple[list[Variant], list[Variant], list[str]]:
    """What to measure; which of it is the recipe as it stands (several with "auto"); notes on that."""
    wanted, schedule = recipe.pipeline.micro_batches, recipe.pipeline.schedule
    tried = [n for n in TRIED if n <= recipe.train.batch_size] or [1]
    count, notes = 1, []
    if wanted == AUTO:
        fixed = " and ".join(map(str, tried))
        notes.append(f'pipeline.micro_batches = "auto" chooses while it trains: measured with {fixed} instead')
    elif isinstance(wanted, int):
        count = wanted
    else:
        count = int(wanted[-1][1])
        notes.append(f"pipeline.micro_batches is a list: measured with its last entry, {count}")
    own = [Variant(schedule, n) for n in (tried if wanted == AUTO else [count])]
    found = [*own, Variant("serial", count), Variant("serial", 1)]
    if workers > 1:
        found += [Variant("nested", n) for n in ([count] if count > 1 else tried)]
    if workers == 1 or count == 1:  # otherwise `nested` shows what looking ahead brings
        found.append(Variant("dbp", count))
    # Limits run under `serial`, where nothing gets in the way of what is measured.
    found += [Variant("serial", count, only) for only in (LIMITS if workers > 1 else ["compute"])]
    return list(dict.fromkeys(found)), own, notes


def profile(recipe: Recipe, seconds: float, world: World, tell: Callable[[float, str], None]) -> dict[str, Any]:
    """Measures for about `seconds` and advises.  Returns the same result on every worker."""
    torch.set_num_threads(recipe.train.threads)
    wanted, own, notes = variants(recipe, world.size)
    turns = _Turns(recipe, world)
    tell(0.0, f"{own[0].name}, first steps")
    turns.take(own[0], 1)  # may compile kernels: not part of the time
    gc.freeze()  # so that the collection after every turn skips what is loaded by now
    begin = time.perf_counter()
    step_s = _slowest(world, sum(turns.take(own[0], LEAST_STEPS).exposed.values()) / 1e3)
    spare_s = seconds / ROUNDS_WANTED / len(wanted) - _slowest(world, time.perf_counter() - begin)
    steps = LEAST_STEPS + min(MOST_STEPS - LEAST_STEPS, max(0, int(spare_s / step_s)))
    rounds: list[dict[Variant, Turn]] = []
    took = 0.0
    while not rounds or _another_round(len(rounds), took, seconds):
        taken = {}
        for variant in wanted if len(rounds) % 2 == 0 else wanted[::-1]:
            done = min(0.99, (time.perf_counter() - begin) / seconds)
            tell(done, f"round {len(rounds) + 1}, {variant.name}")
            taken[variant] = turns.take(variant, steps)
        rounds.append(taken)
        took = _slowest(world, time.perf_counter() - begin)
    epochs = int(_slowest(world, turns.stream.epoch))
    if epochs:
        notes.append(f"the data ended and started again {epochs} time" + "s" * (epochs > 1))
    if len(rounds) < LEAST_ROUNDS:
        notes.append(f"only {len(rounds)} round{'s' * (len(rounds) > 1)} in {took:.0f} s: more --seconds tell more")
    notes += [f"{variant.name}, {note}" for variant, note in turns.device_notes.items()]
    rows = int(_slowest(world, sum(len(store) for store in turns.tables)))
    turns.close()
    gc.unfreeze()
    figures = _figures(recipe, world, own, _gather(world, rounds), rows)
    outcome, changes = advise(figures)
    return {
        "recipe": recipe.name,
        "workers": world.size,
        "machines": figures.machines,
        "seconds": took,
        "rounds": len(rounds),
        "steps_per_turn": steps,
        "own": figures.own.name,
        "variants": [_described(figures, one) for one in (*figures.runs, *figures.limits)],
        "limits_ms": figures.limits_of(figures.own),
        "dram_rows": figures.dram_rows,
        "notes": notes,
        "outcome": outcome,
        "changes": [asdict(change) for change in changes],
    }


def _another_round(rounds: int, took: float, seconds: float) -> bool:
    """Whether one more fits; three, the fewest that can be sure of a gain, may take twice the time."""
    end = took * (rounds + 1) / rounds
    return end <= seconds or (rounds < LEAST_ROUNDS and end <= 2 * seconds)


class _Turns:
    """Runs turns on one worker."""

    def __init__(self, recipe: Recipe, world: World) -> None:
        self._recipe, self._world = recipe, world
        prepare_data(recipe, world)
        self._source = open_source(recipe, "train", world)
        size = recipe.train.batch_size
        self.stream = SharedStream(self._source, size, rank=world.rank, workers=world.size, epochs=None)
        self.tables: list[KeyedRows] = []
        self.device_notes: dict[Variant, str] = {}
        """Of variants that ran on a device: how the host waited for it."""

    def take(self, variant: Variant, steps: int) -> Turn:
        pipeline = self._build(variant)
        for _ in range(WARM_STEPS):
            self._step(pipeline)
        pipeline.timeline.restart()
        sent, samples, ends = pipeline.traffic.bytes_sent, 0, [time.perf_counter()]
        for _ in range(steps):
            samples += self._step(pipeline)
            ends.append(time.perf_counter())
        sent = pipeline.traffic.bytes_sent - sent
        stages = pipeline.timeline.report()
        step_ms = 1e3 * float(np.median(np.diff(ends)))
        scale = step_ms / max(1e-9, sum(ms["exposed_ms"] for ms in stages.values()))
        turn = Turn(
            {stage: scale * ms["exposed_ms"] for stage, ms in stages.items()},
            max(stages[stage]["busy_ms"] if stage in stages else 0.0 for stage in STORAGE),
            samples / steps,
            sent / steps,
        )
        pipeline.settle()
        if variant.only is None and "device" in (figures := pipeline.figures()):
            self.device_notes[variant] = waits_in_words(figures["device"], WARM_STEPS + steps, step_ms)
        if variant.only is None:
            pipeline.replace_stores([])  # the tables stay for the next turn
        pipeline.close()
        del pipeline
        gc.collect()  # lanes and stages refer to each other: do not build the next pipeline beside this one
        return turn

    def close(self) -> None:
        self.stream.close()
        for store in self.tables:
            store.close()

    def _build(self, variant: Variant) -> TrainPipeline:
        section = self._recipe.pipeline.changed(schedule=variant.schedule, micro_batches=variant.micro_batches)
        pipeline = make_pipeline(replace(self._recipe, pipeline=section), self._source, self._world, empty=True)
        if variant.only is not None:
            leave_out(pipeline, variant.only)
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


def _gather(world: World, mine: Any) -> list[Any]:
    if world.size == 1:
        return [mine]
    everyone: list[Any] = [None] * world.size
    dist.all_gather_object(everyone, mine, group=world.groups["metrics"])
    return everyone


def _slowest(world: World, value: float) -> float:
    """The largest of all workers, so that all take the same decisions."""
    return max(_gather(world, value))


def _figures(
    recipe: Recipe, world: World, own: list[Variant], ranks: list[list[dict[Variant, Turn]]], rows: int
) -> ProfileFigures:
    measured = [_measured(v, [[taken[v] for taken in rounds] for rounds in ranks]) for v in ranks[0][0]]
    runs = [one for one in measured if one.only is None]
    serial = next(v for v in ranks[0][0] if v.schedule == "serial" and v.only is None)
    dram_rows = recipe.tables.dram_rows or 1
    on_machine = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    cores = len(os.sched_getaffinity(0)) // on_machine
    return ProfileFigures(
        own=min((one for one in runs if one.name in [v.name for v in own]), key=lambda one: one.step_ms),
        runs=runs,
        limits=[one for one in measured if one.only is not None],
        storage_ms=max(statistics.median(taken[serial].storage_ms for taken in rounds) for rounds in ranks),
        machines=math.ceil(world.size / on_machine),
        threads=cores if cores >= 2 * recipe.train.threads else None,
        dram_rows=dram_rows if recipe.tables.disk_path is not None and rows > dram_rows else None,
    )


def _measured(variant: Variant, ranks: list[list[Turn]]) -> MeasuredVariant:
    """From the turns of every worker."""
    every = [turn for turns in ranks for turn in turns]
    stages = dict.fromkeys(stage for turn in every for stage in turn.exposed)
    counted = [s for s in stages if variant.only is None or (s in STAGES and STAGES[s].share in LIMITS[variant.only])]
    round_ms = [max(sum(turn.exposed.get(s, 0.0) for s in counted) for turn in turns) for turns in zip(*ranks)]
    step_ms = max(1e-9, statistics.median(round_ms))
    exposed = {stage: statistics.fmean(turn.exposed.get(stage, 0.0) for turn in every) for stage in counted}
    scale = step_ms / max(1e-9, sum(exposed.values()))  # from the mean worker's step to the slowest one's
    return MeasuredVariant(
        **vars(variant),
        round_ms=round_ms,
        exposed={stage: ms * scale for stage, ms in exposed.items()},
        samples_per_s=1e3 * statistics.fmean(turn.samples for turn in every) / step_ms,
        bytes_sent=statistics.fmean(turn.bytes_sent for turn in every),
    )


def _described(figures: ProfileFigures, one: MeasuredVariant) -> dict[str, Any]:
    low, high = (spread(one.round_ms)[end] for end in ("low", "high"))
    more = {"name": one.name, "own": one is figures.own, "step_ms": one.step_ms, "spread_ms": [low, high]}
    return vars(one) | more | {"exposed_ms": divide(one.exposed)}
