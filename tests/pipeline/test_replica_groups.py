"""Replica groups: the oracle's training, bit for bit the same under every schedule and on every replica; and what breaks that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import oracle
import samples
from nestpipe import SGD, Adam, RowWiseAdagrad, TrainPipeline, World
from nestpipe.checkpoint.replicas import ReplicasDiffer, compare_replicas
from nestpipe.comm.consistency import NotConsistent
from nestpipe.comm.exchange import Shared
from nestpipe.config.eviction import EvictionPolicy
from nestpipe.keys.window import run_of
from nestpipe.ops import rows
from nestpipe.pipeline import NotFinite
from nestpipe.sparse import routing
from nestpipe.sparse.batch_context import BatchContext
from oracle import Trained, distance
from training import Part, Setting, everything, joined, make_pipeline, my_batches, train
from workers import run

EXACT = 1e-9
"""Of float64, relative to the largest entry."""
SLOW = pytest.mark.slow


def train_in_groups(world: World, setting: Setting, size: int) -> Part:
    return train(world, setting, group_size=size)


@pytest.mark.parametrize(
    ("model", "workers", "size", "micro_batches", "schedule"),
    [
        ("dlrm", 2, 1, 3, "nested"),
        ("dlrm", 4, 2, 1, "dbp"),
        pytest.param("hstu", 3, 1, 3, "fwp", marks=SLOW),
        pytest.param("hstu", 4, 2, 2, "nested", marks=SLOW),
        pytest.param("dlrm", 6, 2, 3, "serial", marks=SLOW),
    ],
)
def test_training_is_the_oracles(model: str, workers: int, size: int, micro_batches: int, schedule: str) -> None:
    """Promise: with groups too, 12 clipped steps give plain torch's losses, norms, rows, state and dense parameters, on workers
    without data and with batches of one sample; replicas have the same bits."""
    setting = Setting(model, RowWiseAdagrad(0.05), micro_batches, steps=12, schedule=schedule, clip_norm=0.3)
    parts = run(workers, train_in_groups, setting, size)
    for rank, part in enumerate(parts[size:], start=size):
        same, mine = parts[rank % size].trained, part.trained
        for table, found in same.rows.items():
            assert np.array_equal(found, mine.rows[table]) and np.array_equal(same.state[table], mine.state[table])
            assert np.array_equal(same.table_grads[table], mine.table_grads[table])
        assert all(np.array_equal(part.asked[table], found) for table, found in parts[0].asked.items())
        assert mine.losses == same.losses and part.norms == parts[0].norms and part.samples == parts[0].samples
    whole = joined(parts[:size])
    wanted = plain(setting, parts[0])
    assert distance(np.array(whole.losses), np.array(wanted.losses)) < EXACT
    assert distance(np.array(whole.norms), np.array(wanted.norms)) < EXACT
    for what in ("rows", "state", "dense"):
        ours, theirs = getattr(whole, what), getattr(wanted, what)
        assert ours.keys() == theirs.keys()
        assert all(distance(ours[name], theirs[name]) < EXACT for name in theirs)


def plain(setting: Setting, like: Part) -> Trained:
    model = samples.model(setting.model, setting.dtype)
    model.load_state_dict(like.first_dense)
    batches = [samples.batch(setting.model, b, setting.dtype) for b in setting.batches()]
    dense = setting.dense_optimizer
    return oracle.train(model, like.first_rows, batches, setting.optimizer, dense, setting.clip_norm)


def left_by(world: World, setting: Setting, options: dict[str, Any]) -> list[Any]:
    pipeline = make_pipeline(world, setting, **options)
    data, losses = my_batches(world, setting), []
    while step := pipeline.progress(data):
        losses.append((step.loss, step.grad_norm))
    left = everything(pipeline)
    compare_replicas(pipeline, "at the end")
    evicted = pipeline.total_evicted()
    pipeline.close()
    return [losses, left, evicted]


def same_as_serial(world: World, size: int, micro_batches: int, options: dict[str, Any]) -> list[bool]:
    life = EvictionPolicy(admit_after=2, ttl_steps=4, max_rows=60, sweep_every=3)
    found = []
    for schedule in ("serial", "dbp", "fwp", "nested"):
        setting = Setting("dlrm", Adam(0.01), micro_batches, 14, "float32", schedule=schedule, life=life)
        found.append(left_by(world, setting, {"group_size": size, "check_staleness": True, **options}))
    assert sum(found[0][2].values()) > 0, "nothing was evicted"
    return [one == found[0] for one in found]


@pytest.mark.parametrize(
    ("workers", "size", "micro_batches", "options"),
    [
        (2, 1, 3, {}),
        pytest.param(4, 2, 2, {"clustering": True, "window_limit": 200}, marks=SLOW),
        pytest.param(3, 1, 1, {"early_update": False}, marks=SLOW),
    ],
)
def test_every_schedule_is_serial(workers: int, size: int, micro_batches: int, options: dict[str, Any]) -> None:
    """Promise: with eviction, stamps, clustering or dedup per micro-batch, every schedule leaves serial's bits, and replicas are
    the same."""
    assert run(workers, same_as_serial, size, micro_batches, options, deadline=120) == [[True] * 4] * workers


# What breaks it


def leave_a_replica_out(pipeline: TrainPipeline) -> None:
    """Group 0 forgets to add the gradients of the last group."""
    replicas = pipeline.topology.replicas
    exchange = pipeline.sparse._replica_exchange

    class Forgetful:
        def share_rows(self, shared: list[Shared]) -> None:
            exchange.share_rows(shared)
            for one in shared if replicas.rank == 0 else []:
                one.rows[sum(one.sizes[:-1]) :] = 0

    pipeline.sparse._replica_exchange = Forgetful()  # type: ignore[assignment]


def add_in_order_of_arrival(pipeline: TrainPipeline) -> None:
    """The stage as it is, but each replica adds its own gradients first, which are there before the others'."""
    sparse, me = pipeline.sparse, pipeline.topology.replicas.rank

    def hasty(context: BatchContext, micro: int) -> None:
        assert context.routes is not None
        plans = [plan.replicas for plan in context.routes.owned]
        for buffer, plan in zip(context.buffers, plans):
            assert plan is not None
            begins = [run_of(plan.ends, micro, group) for group in range(plan.ends.shape[1])]
            places = [plan.rows[begin:end] for begin, end in begins]
            sums = np.zeros((sum(map(len, places)), buffer.group.dim), buffer.group.dtype)
            parts = np.split(sums, np.cumsum([len(some) for some in places])[:-1])
            rows.gather(buffer.group_grads, places[me], parts[me])
            sparse._replica_exchange.share_rows([Shared(sums, plan.sizes[micro])])
            for group in sorted(range(len(places)), key=lambda g: (g != me, g)):
                rows.add_rows(parts[group], places[group], buffer.grads)
        sparse._sum_squares(context, micro)

    pipeline.replace_stages(replicate=hasty)


def miss_a_key_of_another_group(pipeline: TrainPipeline) -> None:
    """The last group does not take one key that only others touch into its buffer."""
    replicas, real = pipeline.topology.replicas, routing.tell_replicas

    def broken(owned: Any, counted: Any, micros: int, exchange: Any) -> Any:
        unions, counted = real(owned, counted, micros, exchange)
        for union in unions if replicas.rank == replicas.size - 1 else []:
            others = np.setdiff1d(np.arange(len(union.keys)), union.own_rows)
            if len(others):
                union.keys[others[-1]] += 1  # another key takes its place, and its gradients
        return unions, counted

    routing.tell_replicas = broken


BROKEN: dict[str, Callable[[TrainPipeline], None]] = {
    "a replica left out": leave_a_replica_out,
    "added in order of arrival": add_in_order_of_arrival,
    "a key missing from the union": miss_a_key_of_another_group,
}


def train_broken(world: World, how: str | None) -> str:
    setting = Setting("dlrm", Adam(0.01), 2, 12, "float32", schedule="nested")
    before = routing.tell_replicas
    pipeline = make_pipeline(world, setting, group_size=1)
    try:
        if how is not None:
            BROKEN[how](pipeline)
        data = my_batches(world, setting)
        while pipeline.progress(data):
            pass
        pipeline.settle()
        compare_replicas(pipeline, "after 12 steps")
    except ReplicasDiffer as error:
        return str(error)
    finally:
        routing.tell_replicas = before
        pipeline.close()
    return "no difference"


@pytest.mark.parametrize("how", [None, *BROKEN])
def test_replicas_that_part_are_noticed(how: str | None) -> None:
    """Promise: if a replica misses gradients or a key, or adds in another order, one line names tables, shard and ranks."""
    found = run(3, train_broken, how)
    assert len(set(found)) == 1, found
    if how is None:
        assert found[0] == "no difference"
    else:
        assert "replicas differ after 12 steps: ranks 0 and " in found[0], found[0]
        assert "own shard 0 of 1, hold different rows of table" in found[0], found[0]


# The rest of a pipeline


def a_nan(world: World) -> str:
    setting = Setting("dlrm", SGD(0.1), 2, 6, schedule="nested")
    pipeline = make_pipeline(world, setting, group_size=1)
    grad = pipeline.stage("grad")

    def spoilt(context: BatchContext, micro: int) -> None:
        if context.number == 3 and micro == 1 and world.rank == 1:
            context.windows[0].of(micro).grads[:] = np.nan
        grad(context, micro)

    pipeline.replace_stages(grad=spoilt)
    data = my_batches(world, setting)
    try:
        while pipeline.progress(data):
            pass
    except NotFinite as error:
        return str(error)
    finally:
        pipeline.close()
    return "trained"


def test_a_nan_in_any_group_stops_all() -> None:
    """Promise: a gradient that is not finite in one group is refused by all workers, and its worker is named."""
    found = run(2, a_nan)
    assert found[0] == found[1] and "batch 3: the gradient is not finite on rank 1" in found[0], found


def differing(world: World) -> str:
    try:
        make_pipeline(world, Setting("dlrm", SGD(0.1)), group_size=1 + world.rank % 2)
    except NotConsistent as error:
        return str(error)
    return "made"


def refused(world: World) -> str:
    try:
        make_pipeline(world, Setting("dlrm", SGD(0.1)), group_size=3)
    except ValueError as error:
        return str(error)
    return "made"


def test_wrong_sizes_are_refused_by_all() -> None:
    """Promise: all workers must have the same group size, and one that divides their number."""
    assert all("workers see different pipeline config" in text for text in run(2, differing))
    assert all("it can be 1, 2" in text for text in run(2, refused))


def traffic(world: World, size: int) -> dict[str, Any]:
    setting = Setting("dlrm", SGD(0.1), 2, 8, "float32", schedule="nested")
    pipeline = make_pipeline(world, setting, group_size=size)
    sums: list[int] = []
    replicate = pipeline.stage("replicate")

    def counted(context: BatchContext, micro: int) -> None:
        replicate(context, micro)
        assert context.routes is not None
        for plan, group in zip(context.routes.owned, pipeline.sparse.groups):
            assert plan.replicas is not None
            own = plan.replicas.sizes[micro][pipeline.topology.replicas.rank]
            sums.append(own * group.dim * 4 * (pipeline.topology.replicas.size - 1))

    pipeline.replace_stages(replicate=counted)
    data = my_batches(world, setting)
    while pipeline.progress(data):
        pass
    pipeline.settle()
    figures = pipeline.figures()
    on_lane = pipeline.traffic.by_rank("replica")
    mine = set(pipeline.topology.shard.ranks)
    inside = {lane: sum(n for r, n in pipeline.traffic.by_rank(lane).items() if r not in mine) for lane in ("network",)}
    pipeline.close()
    return {"counted": sum(sums), "sent": sum(on_lane.values()), "rows left the group": inside["network"], **figures}


def test_bytes_between_groups_are_counted() -> None:
    """Promise: between groups travel one summed gradient per row that a group touches, and keys; no row; and all is counted."""
    for found in run(4, traffic, 2):
        assert found["counted"] == found["sent"] > 0 and found["rows left the group"] == 0
        assert found["bytes_sent_inside_group"] + found["bytes_sent_to_other_groups"] == found["bytes_sent"]
        assert (found["group_size"], found["groups"]) == (2, 2) and found["bytes_sent_to_other_groups"] > found["sent"]
