"""Training on the simulated device: the same bits under every schedule and in every order, few host syncs, no race."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nestpipe.cli.recipes import read_recipe
from nestpipe.comm.errors import PeerLost
from nestpipe.comm.world import World
from nestpipe.data.batch import Batch
from nestpipe.device import sim
from nestpipe.device.choice import NoSuchDevice
from nestpipe.pipeline import NotFinite, TrainPipeline
from nestpipe.sparse.buffers import BufferLimit
from nestpipe.sparse.one_batch_old import OneBatchOld
from nestpipe.tables.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad
from nestpipe.train.verify import verify
from simulated import clicks, dlrm, fuxi, histories, hstu, in_order, train
from workers import run

MOST_SYNCS = 3
"""Of the host, a step, at any number of micro-batches."""


def check_quiet(steps: int) -> None:
    """No race, no host sync on the caller's lane, few in all."""
    found = sim.report()
    assert not found.races
    in_steps = {
        thread: sum(count for place, count in places.items() if "simulated.py" not in place)
        for thread, places in found.host_syncs.items()
    }
    assert in_steps.get("MainThread", 0) <= 1, found.host_syncs  # a table of constants goes up once
    assert sum(in_steps.values()) <= MOST_SYNCS * steps, found.host_syncs


@pytest.mark.parametrize("schedule", ["dbp", "fwp", "nested"])
def test_every_schedule_is_serial_bit_for_bit(schedule: str) -> None:
    in_order("late")
    serial = train(schedule="serial", micro_batches=3)
    for order, seed in [("late", 0), ("random", 1), ("random", 2)]:
        in_order(order, seed)
        assert train(schedule=schedule, micro_batches=3).same(serial), (order, seed)
        check_quiet(steps=6)


def reads_one_batch_old(pipeline: TrainPipeline) -> None:
    old = OneBatchOld(pipeline.stage("embed"), pipeline.stage("update"), pipeline.device)
    pipeline.replace_stages(embed=old.embed, update=old.update)


def test_semi_async_is_serial_that_reads_one_batch_old() -> None:
    """Promise: on a device, too, what is stale does not depend on the order in which streams run."""
    in_order("late")
    oracle = train(schedule="serial", micro_batches=3, change=reads_one_batch_old)
    assert not oracle.same(train(schedule="serial", micro_batches=3))
    for order, seed in [("late", 0), ("random", 1), ("random", 2)]:
        in_order(order, seed)
        assert train(schedule="semi_async", micro_batches=3).same(oracle), (order, seed)
        check_quiet(steps=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "micro_batches"), [(SGD(0.1), 1), (RowWiseAdagrad(0.1), 4), (Adagrad(0.1), 1), (Adam(0.01), 4)]
)
def test_optimizers(optimizer: Any, micro_batches: int) -> None:
    in_order("late")
    options: dict[str, Any] = {"optimizer": optimizer, "micro_batches": micro_batches}
    serial = train(schedule="serial", **options)
    for schedule in ("dbp", "nested"):
        in_order("random", micro_batches)
        assert train(schedule=schedule, **options).same(serial)


@pytest.mark.parametrize(("dtype", "close"), [("float32", 1e-6), ("float64", 1e-12)])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("optimizer", [SGD(0.1), RowWiseAdagrad(0.1), Adagrad(0.1), Adam(0.01)])
def test_one_step_is_the_hosts(dtype: str, close: float, pooling: str, optimizer: Any) -> None:
    """Adagrad's first step divides a gradient by itself: where one is nearly zero, its rounding would be all there is."""
    in_order("late")
    eps: dict[str, Any] = {"eps": 1e-3} if hasattr(optimizer, "eps") else {}
    optimizer = type(optimizer)(lr=optimizer.lr, **eps)
    model, batches = partial(dlrm, pooling, dtype), partial(clicks, dtype=getattr(torch, dtype))
    here, there = (
        train(model, batches, device=d, steps=1, optimizer=optimizer, micro_batches=2) for d in ("cpu", "sim")
    )
    assert abs(here.losses[0] - there.losses[0]) <= close and here.distance(there) <= close


NEXT_ITEM = {"hstu": hstu, **{f"fuxi-{v}": partial(fuxi, v) for v in ("alpha", "beta", "gamma")}}


@pytest.mark.parametrize("model", NEXT_ITEM)
@pytest.mark.parametrize("schedule", ["dbp", "nested"])
def test_next_item_models(schedule: str, model: str) -> None:
    in_order("late")
    serial = train(NEXT_ITEM[model], histories, schedule="serial", micro_batches=3, steps=4)
    in_order("random", 5)
    assert train(NEXT_ITEM[model], histories, schedule=schedule, micro_batches=3, steps=4).same(serial)
    check_quiet(steps=4)


def test_shuffled_atomics_change_no_bit() -> None:
    """Promise: no sum is added in an order that a device may choose."""
    in_order("late")
    dlrms, hstus = train(schedule="nested", micro_batches=3), train(hstu, histories, micro_batches=2, steps=3)
    for seed in (1, 2, 3):
        in_order("late", seed, shuffle_atomics=True)
        assert train(schedule="nested", micro_batches=3).same(dlrms)
        assert train(hstu, histories, micro_batches=2, steps=3).same(hstus)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["dbp", "nested"])
def test_disk_eviction_clipping_and_stamps(schedule: str, tmp_path: Path) -> None:
    """Promise: what holds on the host holds on the device."""
    settings = [
        "data.features=3",
        "data.hot=[1,1,2]",
        "data.ids=80",
        "model.dim=4",
        "model.bottom=[8]",
        "model.top=[8]",
    ]
    settings += ["train.batch_size=16", "tables.admit_after=2", "tables.ttl_steps=4", "tables.sweep_every=2"]
    settings += [f"tables.disk_path={tmp_path}", "tables.dram_rows=20", "train.clip_norm=0.05", "train.device=sim"]
    settings += [f"pipeline.schedule={schedule}", "pipeline.micro_batches=3", "train.epochs=none"]
    recipe = read_recipe("dlrm", settings)
    found = verify(recipe, 9, World.single(), lambda done, what: None, check_staleness=True, orders=2)
    assert found["equal"] and found["compared"]["evicted"] and found["simulated"]["races"] == [], found


def both_on(world: World, schedule: str, order: str, seed: int, size: int | None = None) -> list[Any]:
    in_order("late")
    serial = train(world=world, schedule="serial", micro_batches=3, group_size=size).bits()
    in_order(order, seed)
    found = train(world=world, schedule=schedule, micro_batches=3, group_size=size).bits()
    check_quiet(steps=6)
    return [serial == found, serial]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "schedule", "order", "seed"),
    [(2, "nested", "late", 0), (3, "nested", "random", 1), (2, "dbp", "random", 2)],
)
def test_workers_on_the_simulated_wire(workers: int, schedule: str, order: str, seed: int) -> None:
    found = run(workers, both_on, schedule, order, seed)
    assert all(same for same, _ in found) and len({str(bits) for _, bits in found}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "size", "schedule", "order", "seed"),
    [(2, 1, "nested", "late", 0), (4, 2, "nested", "random", 1), (2, 1, "dbp", "random", 2), (4, 2, "fwp", "late", 0)],
)
def test_replica_groups_on_the_simulated_wire(workers: int, size: int, schedule: str, order: str, seed: int) -> None:
    """Promise: gradients between replicas, too, are waited for, race with nothing and give the bits of `serial`."""
    found = run(workers, both_on, schedule, order, seed, size)
    assert all(same for same, _ in found) and len({str(bits) for _, bits in found}) == 1


def threads_after(world: World, pipelines: int) -> int:
    """Threads of this process after so many pipelines, one after another."""
    in_order("late")
    for _ in range(pipelines):
        train(world=world, schedule="fwp", micro_batches=2)
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.slow
def test_a_closed_pipeline_leaves_no_group_behind() -> None:
    """Communicators and their threads end with the pipeline they were made for."""
    assert max(run(2, threads_after, 4)) <= max(run(2, threads_after, 1)) + 2


def a_stalled_peer(world: World) -> str:
    """Rank 1 does not send the rows of batch 2: rank 0 notices by its deadline, in the words of any lost peer."""
    in_order("late")
    impatient = World(world.rank, world.size, world.groups, 1.0)

    def stall(pipeline: TrainPipeline) -> None:
        embed = pipeline.stage("embed")

        def late(context: Any, micro: int) -> None:
            if world.rank == 1 and context.number == 2:
                time.sleep(4)
            embed(context, micro)

        pipeline.replace_stages(embed=late)

    try:
        train(world=impatient, change=stall, schedule="fwp", micro_batches=2)
    except PeerLost as error:
        return str(error)
    return "nothing happened"


@pytest.mark.slow
def test_a_stalled_peer_is_one_line_with_rank_stage_and_batch() -> None:
    said = run(2, a_stalled_peer)[0]
    assert "rank 0 waited 1 s" in said and "of batch 2" in said, said


def test_the_buffer_limit_is_the_devices() -> None:
    in_order("late")
    with pytest.raises(BufferLimit, match=r"memory\.buffer_limit"):
        train(schedule="serial", buffer_limit=100)


def test_memory_and_host_waits_are_told() -> None:
    in_order("late")
    told = train(schedule="nested", micro_batches=2).figures["device"]
    assert told["name"] == "sim:0" and 0 < told["bytes"]["now"] <= told["bytes"]["peak"]
    assert {stage: wait["count"] for stage, wait in told["host_waits"].items()} == {"agree": 6, "writeback": 6}


def test_a_bad_batch_is_refused_and_training_goes_on() -> None:
    """Under `serial` a caller may skip a batch that is not finite."""
    in_order("late")

    def batches(steps: int, rank: int) -> Iterator[Batch]:
        for number, batch in enumerate(clicks(steps, rank)):
            assert batch.labels is not None
            yield Batch(batch.sparse_features, batch.dense, batch.labels * (float("nan") if number == 1 else 1.0))

    with pytest.raises(NotFinite, match="batch 1: the loss is not finite on rank 0"):
        train(batches=batches, schedule="nested", micro_batches=2)


def test_weight_gradients_are_deferred_there_too() -> None:
    in_order("late")
    kept: list[int] = []

    def count(pipeline: TrainPipeline) -> None:
        weight_grad = pipeline.stage("weight_grad")

        def counting(context: Any, micro: int) -> None:
            assert pipeline._stages.deferred is not None
            kept.append(len(pipeline._stages.deferred._kept))
            weight_grad(context, micro)

        pipeline.replace_stages(weight_grad=counting)

    train(schedule="nested", micro_batches=2, change=count)
    assert kept and min(kept) > 0


def test_a_model_on_two_devices_is_refused() -> None:
    in_order("late")

    class Torn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here, self.there = nn.Linear(1, 1), nn.Linear(1, 1).to("sim")

    with pytest.raises(NoSuchDevice, match="move all of it to one device"):
        TrainPipeline(Torn())


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_bf16_trains_nearly_the_same(device: str) -> None:
    in_order("late")
    full, half = (train(device=device, steps=12, precision=precision) for precision in ("float32", "bf16"))
    assert full.losses != half.losses
    assert max(abs(a - b) for a, b in zip(full.losses, half.losses)) < 0.02
    assert all(values.dtype == "float32" for values in half.rows.values())


def test_evaluation_and_lookups() -> None:
    in_order("late")
    seen: list[Any] = []

    def look(pipeline: TrainPipeline) -> None:
        for batch, logits in pipeline.evaluate(clicks(2)):
            assert logits.device.type == pipeline.device.torch_device.type
            seen.append((len(batch), logits.cpu()))

    here = train(device="cpu", change=look)
    there = train(device="sim", change=look)
    assert len(seen) == 4 and all(torch.allclose(a[1], b[1], atol=1e-6) for a, b in zip(seen[:2], seen[2:]))
    assert here.distance(there) < 1e-3
