"""Every schedule is serial, bit for bit, whatever keys consecutive batches share; and what breaks it is noticed."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from happened import Happened
from nestpipe import (
    SGD,
    Adagrad,
    Adam,
    Batch,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    TrainPipeline,
    World,
)
from nestpipe.ops import rows_kernels as kernels
from nestpipe.pipeline import NotFinite
from nestpipe.schedule import BUILDERS, EXACT, STALE
from nestpipe.sparse.batch_context import BatchContext
from nestpipe.sparse.stages import SparseStages
from nestpipe.sparse.staleness import StaleRead
from training import everything
from workers import run

Steps = list[list[list[int]]]
"""Per step, per worker: the keys of its samples, one each."""

OPTIMIZERS = {"sgd": SGD(0.1), "rowwise": RowWiseAdagrad(0.1), "adagrad": Adagrad(0.1), "adam": Adam(0.1)}


class Model(nn.Module):
    """Two tables of different dimension on one feature, and a dense layer, so that every part of a step matters."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = EmbeddingBagCollection(
            [EmbeddingBagConfig(f"t{d}", d, ["f"], init_scale=1.0) for d in (3, 5)],
        )
        torch.manual_seed(3)
        self.dense = nn.Linear(8, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, None]:
        return self.dense(self.sparse(batch.sparse_features).values()).square().mean(), None


def batches(steps: Steps, rank: int) -> Iterator[Batch]:
    for step in steps:
        keys = step[rank]
        ids = torch.tensor(keys, dtype=torch.int64)
        yield Batch(KeyedJaggedTensor(["f"], ids, lengths=torch.ones(len(keys), dtype=torch.int64), stride=len(keys)))


def trained(
    world: World,
    steps: Steps,
    schedule: str,
    optimizer: str = "adam",
    micro_batches: int = 1,
    poison: Callable[[TrainPipeline], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Losses and the bytes of everything on this worker."""
    model = Model()
    pipeline = TrainPipeline(
        model,
        torch.optim.Adam(model.parameters(), 0.1),
        OPTIMIZERS[optimizer],
        schedule=schedule,
        micro_batches=micro_batches,
        world=world,
        **options,
    )
    if poison is not None:
        poison(pipeline)
    data = batches(steps, world.rank)
    losses = []
    try:
        while step := pipeline.progress(data):
            losses.append(step.loss)
    except NotFinite:
        pipeline.close()  # lanes may still be sending what was read ahead, and the next pipeline has the same connections
        raise
    left = everything(pipeline)
    pipeline.close()
    return {**left, "losses": losses}


def both(
    world: World, steps: Steps, optimizer: str, micro_batches: int, schedule: str, options: dict[str, Any]
) -> bool:
    serial = trained(world, steps, "serial", optimizer, micro_batches, **options)
    return serial == trained(world, steps, schedule, optimizer, micro_batches, **options)


def keys(draw: st.DrawFn, pool: list[int], most: int) -> list[int]:
    return draw(st.lists(st.sampled_from(pool), max_size=most))


@st.composite
def overlapping(draw: st.DrawFn, workers: tuple[int, ...] = (1, 2, 3)) -> tuple[int, Steps]:
    """Batches whose keys come from one of: a common pool, a pool per parity (t-2 and t only), a pool per step, one key."""
    number = draw(st.sampled_from(workers))
    count = draw(st.integers(1, 9))
    kind = draw(st.sampled_from(["common", "every other", "disjoint", "one key", "mixed"]))
    steps: Steps = []
    for step in range(count):
        pool = {
            "common": list(range(6)),
            "every other": [100 * (step % 2) + k for k in range(5)],
            "disjoint": [1000 * step + k for k in range(5)],
            "one key": [7],
            "mixed": [*range(3), 100 * (step % 2), 1000 * step, -(2**63), 2**63 - 1],
        }[kind]
        steps.append([keys(draw, pool, 6) for _ in range(number)])
    if draw(st.booleans()):
        steps[draw(st.integers(0, count - 1))][draw(st.integers(0, number - 1))] = []
    return number, steps


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    overlapping(),
    st.sampled_from(list(OPTIMIZERS)),
    st.sampled_from([1, 3, 5]),
    st.sampled_from([name for name in EXACT if name != "serial"]),
    st.fixed_dictionaries(
        {
            "clustering": st.booleans(),
            "window_limit": st.sampled_from([None, 1, 200]),
            "early_retrieve": st.sampled_from([None, True]),
        }
    ),
)
def test_bit_for_bit(
    drawn: tuple[int, Steps], optimizer: str, micro_batches: int, schedule: str, options: dict[str, Any]
) -> None:
    """Promise 1: any overlap of consecutive batches, any optimizer, 1 to 3 workers, empty and uneven batches, any schedule;
    dedup over the window or, where its limit says so (for some batches, on some workers), per micro-batch."""
    workers, steps = drawn
    assert all(run(workers, both, steps, optimizer, micro_batches, schedule, options))


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    overlapping(workers=(2, 3)),
    st.sampled_from(list(OPTIMIZERS)),
    st.sampled_from([1, 3]),
    st.sampled_from([name for name in BUILDERS if name != "serial" and name not in STALE]),
    st.fixed_dictionaries({"window_limit": st.sampled_from([None, 200]), "group_size": st.just(1)}),
)
def test_bit_for_bit_in_groups(
    drawn: tuple[int, Steps], optimizer: str, micro_batches: int, schedule: str, options: dict[str, Any]
) -> None:
    """Promise 1 with replica groups: whatever keys groups share, with empty groups and batches of one sample."""
    workers, steps = drawn
    assert all(run(workers, both, steps, optimizer, micro_batches, schedule, options))


EVERY_OTHER: Steps = [[[100 * (t % 2), 100 * (t % 2) + 1, t], [100 * (t % 2), 50 + t]] for t in range(8)]
COMMON: Steps = [[[1, 2, 3, 10 + t], [2, 3, 4, 30 + t]] for t in range(8)]


def without_sync(pipeline: TrainPipeline) -> None:
    """The shared rows are not copied."""
    sync = pipeline.sparse.sync

    def broken(context: BatchContext) -> None:
        context.lists = [replace(lists, shared=(lists.shared[0][:0], lists.shared[1][:0])) for lists in context.lists]
        sync(context)

    pipeline.sparse.sync = broken  # type: ignore[method-assign]


def without_state(pipeline: TrainPipeline) -> None:
    """Values are copied, optimizer state is not."""
    sync = pipeline.sparse.sync

    def broken(context: BatchContext) -> None:
        before = [buffer.state.copy() for buffer in context.buffers]
        copy_rows = kernels.copy_rows
        states = {id(buffer.state) for buffer in context.buffers}
        kernels.copy_rows = lambda s, i, t, j: None if id(t) in states else copy_rows(s, i, t, j)  # type: ignore[assignment]
        try:
            sync(context)
        finally:
            kernels.copy_rows = copy_rows
        # what `sync` has not filled is whatever was in that memory before, NaN too
        kept = (np.array_equal(b.state, old, equal_nan=True) for b, old in zip(context.buffers, before))
        assert all(kept), "the mutation did not take"

    pipeline.sparse.sync = broken  # type: ignore[method-assign]


def late_writeback(pipeline: TrainPipeline) -> None:
    """writeback(t-2) comes after retrieve(t): kept back until the next batch has been retrieved."""
    kept: list[BatchContext] = []
    writeback, retrieve = SparseStages.writeback, SparseStages.retrieve

    def hold(context: BatchContext, micro: int) -> None:
        kept.append(context)

    def read_first(context: BatchContext, micro: int) -> None:
        retrieve(pipeline.sparse, context)
        for held in kept:
            writeback(pipeline.sparse, held)
        kept.clear()

    pipeline.engine._stages["writeback"] = hold
    pipeline.engine._stages["retrieve"] = read_first


def embed_too_early(pipeline: TrainPipeline) -> None:
    """Rows travel as `retrieve` found them, before `sync` has put them right."""
    retrieve, embed = SparseStages.retrieve, SparseStages.embed
    early: dict[int, list[Any]] = {}

    def keep(context: BatchContext, micro: int) -> None:
        retrieve(pipeline.sparse, context)
        early[context.number] = [buffer.values.copy() for buffer in context.buffers]

    def send(context: BatchContext, micro: int) -> None:
        right = [buffer.outgoing for buffer in context.buffers]
        for buffer, wrong in zip(context.buffers, early[context.number]):
            buffer.outgoing = wrong
        embed(pipeline.sparse, context, micro)
        for buffer, outgoing in zip(context.buffers, right):
            buffer.outgoing = outgoing

    pipeline.engine._stages |= {"retrieve": keep, "embed": send}


def update_too_early(pipeline: TrainPipeline) -> None:
    """The last micro-batch's gradients are accumulated after the update."""
    accumulate, writeback = SparseStages.accumulate, SparseStages.writeback
    kept: list[tuple[BatchContext, int]] = []

    def hold(context: BatchContext, micro: int) -> None:
        kept.append((context, micro)) if micro == 2 else accumulate(pipeline.sparse, context, micro)

    def late(context: BatchContext, micro: int) -> None:
        for held in kept:
            accumulate(pipeline.sparse, *held)
        kept.clear()
        writeback(pipeline.sparse, context)

    pipeline.engine._stages |= {"accumulate": hold, "writeback": late}


def grad_too_early(pipeline: TrainPipeline) -> None:
    """Gradients leave when the rows arrive, before the micro-batch that uses them last has computed."""
    embed, grad = SparseStages.embed, SparseStages.grad

    def at_once(context: BatchContext, micro: int) -> None:
        embed(pipeline.sparse, context, micro)
        grad(pipeline.sparse, context, micro)

    pipeline.engine._stages |= {"embed": at_once, "grad": lambda context, micro: None}


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["fwp", "nested"])
@pytest.mark.parametrize("poison", [embed_too_early, update_too_early, grad_too_early])
def test_what_breaks_a_window_changes_the_result(poison: Callable[[TrainPipeline], None], schedule: str) -> None:
    """The comparison above is able to fail for what windows could get wrong, too."""
    if poison is embed_too_early and schedule == "fwp":
        pytest.skip("fwp retrieves after the last update, so there is nothing too early to send")
    assert any(run(2, differs, COMMON, poison, schedule, 3))


def differs(
    world: World, steps: Steps, poison: Callable[[TrainPipeline], None], schedule: str = "dbp", micro_batches: int = 1
) -> bool:
    """Other bits, or a run that stopped because a row was not filled (NaN), on all workers at once."""
    right = trained(world, steps, "serial", micro_batches=micro_batches)
    try:
        return right != trained(world, steps, schedule, micro_batches=micro_batches, poison=poison)
    except NotFinite:
        return True


def late_on_one_worker(pipeline: TrainPipeline) -> None:
    """Batch 1 is not finite, and one worker copies rows from its buffer long after all know."""
    without_sync(pipeline)
    sync, rank = pipeline.sparse.sync, pipeline.world.rank

    def late(context: BatchContext) -> None:
        if rank == 1 and context.number == 2:
            time.sleep(0.3)
        sync(context)

    pipeline.sparse.sync = late  # type: ignore[method-assign]


def stops_alike(world: World) -> bool:
    try:
        trained(world, COMMON, "dbp", poison=late_on_one_worker)
    except NotFinite:
        return trained(world, COMMON, "serial") == trained(world, COMMON, "dbp")
    return False


def test_after_a_failure_of_all_workers_each_has_sent_the_same() -> None:
    """Promise: what was read ahead goes its way on every worker or on none, so the next pipeline finds the connections empty."""
    assert all(run(2, stops_alike))


def stale_reads(world: World, steps: Steps, poison: Callable[[TrainPipeline], None] | None, schedule: str) -> str:
    """On a worker by itself, so that its error ends nobody else's run."""
    alone = [[step[world.rank]] for step in steps]
    try:
        trained(World.single(), alone, schedule, poison=poison, check_staleness=True)
    except StaleRead as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "poison, steps", [(without_sync, COMMON), (without_state, COMMON), (late_writeback, EVERY_OTHER)]
)
def test_what_breaks_dbp_changes_the_result(poison: Callable[[TrainPipeline], None], steps: Steps) -> None:
    """The comparison above is able to fail: each of the three mistakes gives other bits."""
    assert any(run(2, differs, steps, poison))


@pytest.mark.parametrize(
    "poison, steps", [(without_sync, COMMON), (without_state, COMMON), (late_writeback, EVERY_OTHER)]
)
def test_staleness_check_names_what_is_stale(poison: Callable[[TrainPipeline], None], steps: Steps) -> None:
    """Promise 7: with stamps on, each of the three mistakes stops the run and names batch, table and key."""
    message = run(1, stale_reads, steps, poison, "dbp")[0]
    assert "was about to read row" in message and "of table 't" in message and "left it" in message


@pytest.mark.parametrize("schedule", BUILDERS)
def test_staleness_check_is_silent_when_nothing_is_stale(schedule: str) -> None:
    """Promise 7: no false alarm, in either schedule."""
    assert run(1, stale_reads, EVERY_OTHER, None, schedule) == [""]


def stamped_is_the_same(world: World, steps: Steps) -> bool:
    plain, stamped = (trained(world, steps, "dbp", check_staleness=on) for on in (False, True))
    return all(plain[k] == stamped[k] for k in plain if not k.startswith("state"))


def test_stamps_change_nothing_else() -> None:
    """--check staleness trains the very same model."""
    assert all(run(2, stamped_is_the_same, COMMON))


class Report(NamedTuple):
    stages: dict[str, dict[str, float]]
    step_ms: float


def timed(world: World, schedule: str, count: int) -> Report:
    """What the timeline says of all steps but the first three.  Under dbp each `compute` waits until the next batch's rows are
    there and the last batch's are written, so that no step has to wait for storage."""
    pipeline = TrainPipeline(Model(), None, SGD(0.1), schedule=schedule, world=world)
    done = Happened()
    functions = {stage: pipeline.engine.stage(stage) for stage in ("retrieve", "writeback", "compute")}

    def storing(stage: str, context: BatchContext, micro: int) -> None:
        functions[stage](context, micro)
        done.add((stage, context.number))

    def computing(context: BatchContext, micro: int) -> None:
        functions["compute"](context, micro)
        others = [("retrieve", context.number + 1), ("writeback", context.number - 1)]
        if schedule == "dbp":
            assert all(done.wait_for(other) for other in others if 0 <= other[1] < count)

    storages = {stage: functools.partial(storing, stage) for stage in ("retrieve", "writeback")}
    pipeline.engine.replace(compute=computing, **storages)
    timeline = pipeline.engine.timeline
    close_step, steps = timeline.close_step, []
    timeline.close_step = lambda last, begin, end: (steps.append((begin, end)), close_step(last, begin, end))[1]  # type: ignore[method-assign]
    data = batches([[[t, 1], [t, 2]] for t in range(count)], world.rank)
    for _ in range(3):
        pipeline.progress(data)
    timeline.restart()
    while pipeline.progress(data):
        pass
    report = timeline.report()
    pipeline.close()
    assert len(steps) == count and all(end == begin for (_, end), (begin, _) in itertools.pairwise(steps))
    return Report(report, 1e3 * (steps[-1][1] - steps[3][0]) / (count - 3))


def test_report_says_what_was_hidden_and_adds_up_to_the_step() -> None:
    """The exposed column is the step; storage is exposed under serial and hidden under dbp."""
    for schedule in ("serial", "dbp"):
        for report in run(2, timed, schedule, 12):
            total = sum(stage["exposed_ms"] for stage in report.stages.values())
            assert total == pytest.approx(report.step_ms)
            for storage in (report.stages["retrieve"], report.stages["writeback"]):
                exposed = storage["busy_ms"] if schedule == "serial" else 0.0
                assert storage["exposed_ms"] == pytest.approx(exposed) and storage["busy_ms"] > 0, report
