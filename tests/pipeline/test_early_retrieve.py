"""Rows retrieved while the batch before last is still being written back: the same bits, from a third buffer."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import numpy as np
import pytest
from test_schedules import COMMON, EVERY_OTHER, Model, Steps, batches, trained

from happened import Happened
from nestpipe import SGD, TrainPipeline, World
from nestpipe.sparse.batch_context import BatchContext
from nestpipe.sparse.staleness import StaleRead
from nestpipe.tables.disk.tiered_store import DiskTier
from workers import run

ALTERNATING: Steps = [[[1, 2, 10 + t % 2, 20 + t % 3, 30 + t], [2, 3, 10 + t % 2, 20 + t % 3]] for t in range(9)]
"""Keys of every batch, of every second one, of every third one, and of one alone."""


def slow_writeback(pipeline: TrainPipeline) -> None:
    """So that the next retrieve but one has begun and ended long before it."""
    write = pipeline.engine.stage("writeback")
    pipeline.engine.replace(writeback=lambda context, micro: (time.sleep(0.03), write(context, micro))[1])


def slow_sync(pipeline: TrainPipeline) -> None:
    copy = pipeline.engine.stage("sync")
    pipeline.engine.replace(sync=lambda context, micro: (time.sleep(0.03), copy(context, micro))[1])


def from_the_store(pipeline: TrainPipeline) -> None:
    """The mistake: rows of the batch before last are read from the store as if they had to be there."""

    def nothing(context: BatchContext) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(np.empty(0, np.int64), np.empty(0, np.int64)) for _ in context.buffers]

    pipeline.sparse._rows_two_before = nothing  # type: ignore[method-assign]
    slow_writeback(pipeline)


def without_state(pipeline: TrainPipeline) -> None:
    """The mistake: values are copied, optimizer state is not."""
    copy = pipeline.sparse._copy_from_two_before

    def values_alone(context: BatchContext) -> None:
        kept = [buffer.state for buffer in context.two_before.buffers] if context.two_before else []
        for buffer in context.two_before.buffers if context.two_before else []:
            buffer.state = np.zeros_like(buffer.state)
        before = context.two_before
        copy(context)
        for buffer, state in zip(before.buffers if before else [], kept):
            buffer.state = state

    pipeline.sparse._copy_from_two_before = values_alone  # type: ignore[method-assign]


def same(world: World, steps: Steps, schedule: str, micro_batches: int, poison: Any, on_disk: bool) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        tier = DiskTier(folder, 2) if on_disk else None
        right = trained(world, steps, "serial", micro_batches=micro_batches)
        options = {"early_retrieve": None if on_disk else True, "tier": tier}
        return right == trained(world, steps, schedule, micro_batches=micro_batches, poison=poison, **options)


@pytest.mark.slow
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("steps", [COMMON, EVERY_OTHER, ALTERNATING])
@pytest.mark.parametrize("schedule, micro_batches", [pytest.param("dbp", 1, marks=pytest.mark.slow), ("nested", 3)])
def test_a_slow_writeback_changes_no_bit(schedule: str, micro_batches: int, steps: Steps, on_disk: bool) -> None:
    """Promise: however late the store gets rows of t-1, t+1 has them."""
    assert all(run(2, same, steps, schedule, micro_batches, slow_writeback, on_disk))


@pytest.mark.parametrize("poison", [from_the_store, without_state])
def test_what_breaks_it_changes_the_result(poison: Any) -> None:
    """The comparison above is able to fail."""
    assert not any(run(2, same, ALTERNATING, "dbp", 1, poison, False))


def stale(world: World, poison: Any) -> str:
    steps = [[step[0]] for step in ALTERNATING]
    try:
        trained(World.single(), steps, "nested", poison=poison, check_staleness=True, early_retrieve=True)
    except StaleRead as error:
        return str(error)
    return ""


def test_the_staleness_check_sees_it() -> None:
    assert "was about to read row" in run(1, stale, from_the_store)[0]
    assert run(1, stale, slow_writeback) == [""]


class Meetings:
    """Holds every `writeback` of t until `retrieve` of t+2 has begun, or for `patience` seconds; counts those that met."""

    def __init__(self, pipeline: TrainPipeline, patience: float) -> None:
        self._patience = patience
        self._begun = Happened()
        self._write, self._read = (pipeline.engine.stage(name) for name in ("writeback", "retrieve"))
        self.until = 0
        """Batches from here on are not there: nobody is to wait for them."""
        self.count = 0
        pipeline.engine.replace(writeback=self._writeback, retrieve=self._retrieve)

    def _retrieve(self, context: BatchContext, micro: int) -> None:
        self._begun.add(context.number)
        self._read(context, micro)

    def _writeback(self, context: BatchContext, micro: int) -> None:
        if context.number + 2 < self.until:
            self.count += self._begun.wait_for(context.number + 2, self._patience)
        self._write(context, micro)


def buffers_after_epochs(world: World, slow: Any, early_retrieve: bool, epochs: int) -> tuple[int, int, int]:
    """Of the only group: buffers free at the end, bytes that are not, and writebacks that ran beside the retrieve of t+2."""
    model = Model()
    pipeline = TrainPipeline(model, None, SGD(0.1), schedule="dbp", early_retrieve=early_retrieve, world=World.single())
    slow(pipeline)
    meetings = Meetings(pipeline, patience=120.0 if early_retrieve else 0.03)
    pool = pipeline.sparse.buffers.pools[0]
    for _ in range(epochs):
        meetings.until = pipeline.next_batch + len(ALTERNATING)
        data = batches([[step[0]] for step in ALTERNATING], 0)
        while pipeline.progress(data):
            pass
    pipeline.close()
    row_bytes = sum(buffer.capacity for buffer in pool._free) * pool.row_bytes
    return len(pool._free), pool.bytes - row_bytes, meetings.count


@pytest.mark.slow
@pytest.mark.parametrize("slow", [slow_writeback, slow_sync])
@pytest.mark.parametrize("early_retrieve, most", [(False, 2), (True, 3)])
def test_buffers_are_two_or_three_and_all_come_back(early_retrieve: bool, most: int, slow: Any) -> None:
    """Promise: two batches' rows in memory, or three with early_retrieve, whose writebacks really run meanwhile; none is lost at
    the end of an epoch."""
    free, held, met = run(1, buffers_after_epochs, slow, early_retrieve, 4)[0]
    assert free <= most and held == 0
    assert met == (4 * (len(ALTERNATING) - 2) if early_retrieve else 0)
