"""Iterators of batches under schedules that look ahead: none lost, none trained in place of another, errors in their turn."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from test_schedules import Model, batches

from nestpipe import Adam, Batch, KeyedJaggedTensor, TrainPipeline, World
from nestpipe.schedule import BUILDERS
from workers import run_once


class Restarting:
    """Begins anew after it has said that it is at its end, as iterators should not but often do."""

    def __init__(self, count: int, fail_at: int | None = None) -> None:
        self.count, self.fail_at, self.at = count, fail_at, 0

    def __iter__(self) -> Restarting:
        return self

    def __next__(self) -> Batch:
        if self.at == self.fail_at:
            raise OSError("no such day")
        if self.at == self.count:
            self.at = 0
            raise StopIteration
        self.at += 1
        return next(batches([[[self.at, 1]]], 0))


def single(schedule: str) -> TrainPipeline:
    model = Model()
    return TrainPipeline(
        model, torch.optim.Adam(model.parameters(), 0.1), Adam(0.1), schedule=schedule, world=World.single()
    )


@pytest.mark.parametrize("schedule", ["serial", "dbp"])
def test_no_batch_is_lost_when_an_iterator_begins_anew(schedule: str) -> None:
    """An iterator that has ended is not asked again within its epoch, however far a schedule looks ahead."""
    pipeline, data = single(schedule), Restarting(6)
    counts = []
    for _ in range(3):
        steps = 0
        while pipeline.progress(data):
            steps += 1
        counts.append(steps)
    pipeline.close()
    assert counts == [6, 6, 6]


@pytest.mark.parametrize("schedule", ["serial", "dbp"])
def test_what_was_read_before_an_error_is_trained(schedule: str) -> None:
    """An iterator's error is told when its batch's turn comes; close does not tell it again."""
    pipeline, data = single(schedule), Restarting(9, fail_at=6)
    steps = 0
    with pytest.raises(OSError, match="no such day") as caught:
        while pipeline.progress(data):
            steps += 1
    pipeline.close()
    assert steps == 6 and "load of batch 6" in caught.value.__notes__[0]


class Hostile(Restarting):
    """Its seventh batch is not what the model looks up."""

    def __next__(self) -> Batch:
        batch = super().__next__()
        if self.at != 7:
            return batch
        features = batch.sparse_features
        return dataclasses.replace(
            batch, sparse_features=KeyedJaggedTensor(["else"], features.values(), lengths=features.lengths())
        )


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("schedule", BUILDERS)
def test_a_batch_that_cannot_be_looked_up_stops_the_run_in_its_turn(schedule: str, micro_batches: int) -> None:
    """What is wrong with a batch is found when it is routed, long before: those before it are still trained."""
    model = Model()
    adam = torch.optim.Adam(model.parameters(), 0.1)
    settings = {"schedule": schedule, "micro_batches": micro_batches}
    pipeline, data = TrainPipeline(model, adam, Adam(0.1), world=World.single(), **settings), Hostile(9)
    steps = 0
    with pytest.raises(KeyError, match="no feature 'f' in this batch; it has else") as caught:
        while pipeline.progress(data):
            steps += 1
    pipeline.close()
    assert steps == 6 and caught.value.__notes__[0] == "rank 0, route of batch 6"


def test_another_iterator_in_the_middle_is_refused() -> None:
    """Batches read ahead from one iterator must not be trained in place of another's."""
    pipeline = single("dbp")
    pipeline.progress(Restarting(6))
    with pytest.raises(ValueError, match="until progress returns None"):
        pipeline.progress(Restarting(6))
    pipeline.close()
    with pytest.raises(RuntimeError, match="closed"):
        pipeline.progress(Restarting(6))


def slow_storage(pipeline: TrainPipeline) -> None:
    for stage in ("retrieve", "writeback"):
        function = pipeline.engine.stage(stage)
        pipeline.engine.replace(**{stage: lambda c, m, function=function: (time.sleep(0.02), function(c, m))[1]})


def test_a_lookup_between_steps_sees_the_last_step() -> None:
    """A model called outside the pipeline waits until the last step is in the tables."""
    seen = {}
    for schedule in ("serial", "dbp"):
        pipeline, data = single(schedule), Restarting(8)
        slow_storage(pipeline)
        seen[schedule] = []
        while pipeline.progress(data):
            with torch.no_grad():
                seen[schedule].append(float(pipeline.model(next(batches([[[1, 2, 3]]], 0)))[0]))
        pipeline.close()
    assert seen["serial"] == seen["dbp"]


@pytest.mark.parametrize("schedule", ["dbp", "fwp", "nested"])
def test_after_an_error_nothing_is_trained_any_more(schedule: str) -> None:
    """Promise: who goes on after a batch that was refused is told again; no batch that was read ahead is lost without a word."""
    pipeline, data = single(schedule), Hostile(9)
    with pytest.raises(KeyError):
        while pipeline.progress(data):
            pass
    with pytest.raises(KeyError, match="no feature 'f'"):
        pipeline.progress(data)
    pipeline.close()


def test_serial_may_leave_out_a_batch_that_cannot_be_looked_up() -> None:
    pipeline, data = single("serial"), Hostile(9)
    steps = errors = 0
    while True:
        try:
            if pipeline.progress(data) is None:
                break
            steps += 1
        except KeyError:
            errors += 1
    pipeline.close()
    assert (steps, errors) == (8, 1)


def end_before(world: World) -> str:
    """Worker 1's data is over when worker 0 comes to a batch that it refuses."""
    model = Model()
    pipeline = TrainPipeline(model, torch.optim.Adam(model.parameters(), 0.1), Adam(0.1), world=world)
    data = Hostile(9) if world.rank == 0 else Restarting(3)
    try:
        while pipeline.progress(data):
            pass
    except Exception as error:
        return type(error).__name__
    return "ended"


@pytest.mark.slow
def test_a_refused_batch_is_not_the_end_of_the_data() -> None:
    """Promise: nobody takes a run that failed for one that is done."""
    assert run_once(2, end_before, timeout=2.0) == ["KeyError", "PeerLost"]
