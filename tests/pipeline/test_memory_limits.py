"""What a worker holds beside its tables: limits that are kept and told, and buffers that settle."""

from __future__ import annotations

import pytest
from test_schedules import COMMON, Model, batches, trained

from nestpipe import SGD, TrainPipeline, World
from nestpipe.sparse.buffers import BufferLimit
from workers import run, run_once


def limited(world: World, limit: int) -> str:
    try:
        trained(world, COMMON, "dbp", buffer_limit=limit)
    except BufferLimit as error:
        return str(error)
    return ""


def test_buffer_limit_names_the_batch() -> None:
    """memory.buffer_limit stops a batch that would not fit before memory runs out, and says which and how much."""
    for message in run_once(2, limited, 100, timeout=30):  # what was read ahead is left on the way
        assert "batch 0 needs" in message and "memory.buffer_limit" in message
    assert run(2, limited, 1 << 20) == ["", ""]


def limited_windows(world: World, limit: int | None) -> tuple[list[float], int, int]:
    """Losses, batches whose windows were too large, and bytes sent."""
    model = Model()
    pipeline = TrainPipeline(model, None, SGD(0.1), schedule="nested", micro_batches=4, window_limit=limit, world=world)
    data = batches([[[1, 2, 1, 2, 1, 2, 1, 2] * 4] * 2 for _ in range(5)], world.rank)
    losses = []
    while step := pipeline.progress(data):
        losses.append(step.loss)
    pipeline.close()
    return losses, pipeline.sparse.windows_by_micro, pipeline.sparse.traffic.bytes_sent


def test_a_window_that_would_be_too_large_is_divided() -> None:
    """memory.window_limit: the batch is deduplicated per micro-batch, which sends more, trains the same, and is told."""
    whole, divided = run(2, limited_windows, None), run(2, limited_windows, 1)
    for (losses, none, sent), (others, all_of_them, more) in zip(whole, divided):
        assert none == 0 and all_of_them == 5 and more > 1.5 * sent
        assert others == pytest.approx(losses, rel=1e-5)


def settles(world: World) -> tuple[int, int]:
    from nestpipe.sparse.buffers import MEMORY

    large = [[[1000 + i for i in range(400)]]]
    small = [[[i, i + 1]] for i in range(MEMORY + 6)]
    model = Model()
    pipeline = TrainPipeline(model, None, SGD(0.1), schedule="dbp", world=World.single())
    data = batches(large + small, 0)
    while pipeline.progress(data):
        pass
    pipeline.close()
    return pipeline.sparse.buffers.bytes, pipeline.sparse.buffers.peak


def test_buffers_settle_after_a_large_batch() -> None:
    """Buffers grow with a large batch and are given back when later batches are small."""
    now, peak = run(1, settles)[0]
    assert 0 < now < peak / 10
