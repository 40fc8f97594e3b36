"""`semi_async` computes with rows that are one batch old, exactly those that its meaning says, and loses no update."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_schedules import COMMON, OPTIMIZERS, Model, Steps, batches, overlapping, trained

from nestpipe import SGD, TrainPipeline, World
from nestpipe.pipeline import NotFinite
from nestpipe.sparse.batch_context import BatchContext
from nestpipe.sparse.one_batch_old import OneBatchOld
from nestpipe.sparse.staleness import StaleRead
from nestpipe.tables.disk.tiered_store import DiskTier
from training import everything
from workers import run

ALTERNATING: Steps = [[[1, 2, 10 + t % 2, 20 + t % 3, 30 + t], [2, 3, 10 + t % 2, 20 + t % 3]] for t in range(9)]
"""Keys of every batch, of every second one, of every third one, and of one alone."""


def read_one_batch_old(pipeline: TrainPipeline) -> None:
    """The oracle: `serial`, whose batches read rows of the batch before as they were before its update."""
    old = OneBatchOld(pipeline.stage("embed"), pipeline.stage("update"), pipeline.device)
    pipeline.replace_stages(embed=old.embed, update=old.update)


def compare(
    world: World,
    steps: Steps,
    optimizer: str,
    micro_batches: Any,
    options: dict[str, Any],
    poison: Callable[[TrainPipeline], None] | None = None,
) -> list[bool]:
    """Whether it is the oracle, and whether it is `serial`."""
    with tempfile.TemporaryDirectory() as folder:
        on_disk = options.pop("on_disk", False)
        tier = DiskTier(folder, 2) if on_disk else None
        both = {k: v for k, v in options.items() if k in ("clustering", "window_limit", "clip_norm")}
        oracle = trained(world, steps, "serial", optimizer, micro_batches, poison=read_one_batch_old, **both)
        serial = trained(world, steps, "serial", optimizer, micro_batches, **both)
        found = trained(world, steps, "semi_async", optimizer, micro_batches, poison=poison, tier=tier, **options)
    return [found == oracle, found == serial]


def make_slow(stage: str, pipeline: TrainPipeline) -> None:
    function = pipeline.stage(stage)
    pipeline.replace_stages(**{stage: lambda context, micro: (time.sleep(0.01), function(context, micro))[1]})


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("workers", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_it_is_the_oracle_bit_for_bit(workers: int, optimizer: str, micro_batches: int) -> None:
    """Promise: rows shared with the batch before are read one batch old, and every other bit is as in `serial`."""
    steps = [[*step, [1, 2, 60]] for step in ALTERNATING]
    for found in run(workers, compare, steps, optimizer, micro_batches, {}):
        assert found == [True, False]


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    overlapping(),
    st.sampled_from(list(OPTIMIZERS)),
    st.sampled_from([1, 3, 5, [[0, 2], [2, 1], [3, 6], [5, 4]]]),
    st.fixed_dictionaries(
        {
            "clustering": st.booleans(),
            "window_limit": st.sampled_from([None, 1, 200]),
            "early_retrieve": st.sampled_from([None, False]),
            "look_ahead": st.sampled_from([0, 2, 9]),
            "clip_norm": st.sampled_from([None, 0.05]),
            "early_update": st.booleans(),
            "early_prepare": st.booleans(),
            "on_disk": st.booleans(),
        }
    ),
)
def test_whatever_batches_share(
    drawn: tuple[int, Steps], optimizer: str, micro_batches: Any, options: dict[str, Any]
) -> None:
    """Promise: any overlap, any optimizer, 1 to 3 workers, empty batches, changing numbers of micro-batches, any option."""
    workers, steps = drawn
    assert all(found[0] for found in run(workers, compare, steps, optimizer, micro_batches, options))


STAGES = ("retrieve", "writeback", "peek", "sync", "embed", "grad", "update", "route", "agree")


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_timing_changes_no_bit(stage: str) -> None:
    """Promise: which rows are stale does not depend on which lane is slow."""
    for micro_batches in (1, 3):
        for found in run(2, compare, ALTERNATING, "adam", micro_batches, {}, partial(make_slow, stage)):
            assert found == [True, False], micro_batches


def test_without_shared_rows_it_is_serial() -> None:
    """Promise: nothing else is stale, rows of the batch before last least of all."""
    steps: Steps = [[[10 * (t % 2), 10 * (t % 2) + 1, 50 + t], [10 * (t % 2) + 2, 80 + t]] for t in range(8)]
    for options in ({}, {"early_retrieve": False}):
        assert run(2, compare, steps, "adam", 3, options) == [[True, True]] * 2


# What would break it


def peek_after_update(pipeline: TrainPipeline) -> None:
    """The mistake: rows are peeked again once the batch before has changed them, while some have left: a mixture."""
    update, peek, last = pipeline.stage("update"), pipeline.stage("peek"), []

    def updating(context: BatchContext, micro: int) -> None:
        update(context, micro)
        peek(last.pop(), -1)

    def peeking(context: BatchContext, micro: int) -> None:
        peek(context, micro)
        if context.number:
            last.append(context)

    pipeline.replace_stages(update=updating, peek=peeking)


def peek_two_old(pipeline: TrainPipeline) -> None:
    """The mistake: what is copied beside the rows is a batch older still."""
    peek, kept = pipeline.sparse.peek, {}

    def older(context: BatchContext) -> None:
        peek(context)
        if context.shared and context.previous is not None:
            for g, (buffer, lists) in enumerate(zip(context.buffers, context.lists)):
                kept[context.number, g] = buffer.outgoing[lists.peeked].copy()
                if (context.number - 1, g) in kept and len(kept[context.number - 1, g]) == len(lists.peeked):
                    buffer.outgoing[lists.peeked] = kept[context.number - 1, g]
        if context.peeked_stamps and context.number > 2:
            context.peeked_stamps = [
                stamps - 1 for stamps in context.peeked_stamps
            ]  # the stamps that it would have copied

    pipeline.sparse.peek = older  # type: ignore[method-assign]


def lost_update(pipeline: TrainPipeline) -> None:
    """The mistake: the update starts from what was peeked, so that the one before it is lost."""
    sync = pipeline.sparse.sync

    def losing(context: BatchContext) -> None:
        empty = [replace(lists, shared=(lists.shared[0][:0], lists.shared[1][:0])) for lists in context.lists]
        kept, context.lists = context.lists, empty
        for buffer, lists in zip(context.buffers, kept):
            buffer.values[lists.shared[1]] = buffer.outgoing[lists.peeked]
        sync(context)
        context.lists = kept

    pipeline.sparse.sync = losing  # type: ignore[method-assign]


def differs(world: World, poison: Callable[[TrainPipeline], None]) -> bool:
    try:
        return compare(world, COMMON, "adam", 3, {}, poison)[0] is False
    except NotFinite:
        return True


@pytest.mark.parametrize("poison", [peek_two_old, lost_update])
def test_what_breaks_it_changes_the_result(poison: Callable[[TrainPipeline], None]) -> None:
    """The comparison with the oracle is able to fail."""
    assert run(1, differs, poison) == [True]


def stamped(world: World, steps: Steps, poison: Callable[[TrainPipeline], None] | None, n: int) -> tuple[str, Any]:
    """What `--check staleness` says, and the share of stale reads."""
    model = Model()
    pipeline = TrainPipeline(
        model, None, SGD(0.1), schedule="semi_async", micro_batches=n, check_staleness=True, world=world
    )
    if poison is not None:
        poison(pipeline)
    data = batches(steps, world.rank)
    try:
        while pipeline.progress(data):
            pass
        pipeline.settle()
    except (StaleRead, NotFinite) as error:
        return str(error), None
    figures = pipeline.figures()
    pipeline.close()
    return "", figures


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_stamps_count_what_was_stale(micro_batches: int) -> None:
    """Promise: the measured share is that of the rows which the batch before had, and no alarm is false."""
    found = run(2, stamped, COMMON, None, micro_batches)
    assert [error for error, _ in found] == ["", ""]
    reads = [figures["row_reads"] for _, figures in found]
    # 6 keys a step in each of 2 tables; keys 1 to 4 were in the batch before, but for the first batch
    assert sum(r["all"] for r in reads) == 8 * 6 * 2 and sum(r["one_batch_stale"] for r in reads) == 7 * 4 * 2


@pytest.mark.parametrize("poison", [peek_after_update, peek_two_old, lost_update])
def test_stamps_notice_what_is_not_as_designed(poison: Callable[[TrainPipeline], None]) -> None:
    """Promise: a read that is not one batch old, or an update on top of older rows, stops the run and names table and key."""
    [(error, _)] = run(1, stamped, [step[:1] for step in COMMON], poison, 1)
    assert "row" in error and "of table 't" in error and "left it" in error


def trained_figures(world: World, steps: Steps) -> Any:
    model = Model()
    pipeline = TrainPipeline(model, None, SGD(0.1), schedule="semi_async", micro_batches=2, world=world)
    data = batches(steps, world.rank)
    while pipeline.progress(data):
        pass
    pipeline.settle()
    figures = pipeline.figures()
    pipeline.close()
    return figures["row_reads"]


def test_the_share_is_counted_without_stamps_too() -> None:
    """Promise: what is printed without `--check staleness` is what it would measure."""
    plain = run(2, trained_figures, ALTERNATING)
    assert plain == [figures["row_reads"] for _, figures in run(2, stamped, ALTERNATING, None, 2)]


# Checkpoints


def drained(world: World, at: int, micro_batches: int, options: dict[str, Any]) -> bool:
    """Refreshed after step `at`, as by a checkpoint: like the oracle that reads fresh rows there."""
    found = []
    for schedule in ("serial", "semi_async"):
        model = Model()
        pipeline = TrainPipeline(
            model,
            torch.optim.Adam(model.parameters(), 0.1),
            OPTIMIZERS["adam"],
            schedule=schedule,
            micro_batches=micro_batches,
            world=world,
            **(options if schedule == "semi_async" or "window_limit" in options else {}),
        )
        old = OneBatchOld(pipeline.stage("embed"), pipeline.stage("update"), pipeline.device)
        if schedule == "serial":
            pipeline.replace_stages(embed=old.embed, update=old.update)
        data, losses = batches(ALTERNATING, world.rank), []
        while step := pipeline.progress(data):
            losses.append(step.loss)
            if step.batch == at:
                pipeline.refresh()
                pipeline.refresh()  # twice is once
                old.forget()
        left = {k: v for k, v in everything(pipeline).items() if not k.startswith("state ")}
        found.append({**left, "losses": losses})
        pipeline.close()
    return found[0] == found[1]


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("options", [{}, {"early_retrieve": False}, {"check_staleness": True}, {"window_limit": 1}])
def test_the_batch_after_a_checkpoint_reads_fresh_rows(micro_batches: int, options: dict[str, Any]) -> None:
    """Promise: after a checkpoint the next batch reads what a run reads that resumes there, and later ones read stale again."""
    for at in (0, 3, 8):
        assert all(run(2, drained, at, micro_batches, options)), at
