"""Replicas that train on their own and are averaged: as an oracle does it, and the same under every schedule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from averaged_oracle import Steps
from averaged_oracle import train as oracle
from nestpipe import (
    SGD,
    Batch,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PipelineConfig,
    RowWiseAdagrad,
    TrainPipeline,
    World,
)
from nestpipe.checkpoint import CheckpointWriter, Folder, restore
from nestpipe.checkpoint.replicas import ReplicasDiffer, compare_replicas
from nestpipe.config.eviction import EvictionPolicy
from nestpipe.tables.disk.tiered_store import DiskTier
from nestpipe.train.digest import digest
from training import everything
from workers import run

DIMS = (3, 5)


class Model(nn.Module):
    """Two tables of different dimension on one feature, and a dense layer, in float64."""

    def __init__(self, **table: Any) -> None:
        super().__init__()
        self.sparse = EmbeddingBagCollection(
            [EmbeddingBagConfig(f"t{d}", d, ["f"], init_scale=1.0, dtype="float64", **table) for d in DIMS],
        )
        torch.manual_seed(3)
        self.dense = nn.Linear(sum(DIMS), 1).double()

    def forward(self, batch: Batch) -> tuple[torch.Tensor, None]:
        return self.dense(self.sparse(batch.sparse_features).values()).square().mean(), None


def drawn(workers: int, count: int = 10, seed: int = 0) -> Steps:
    """Keys that groups share, that two batches in a row share, and that only one has; batches of different sizes."""
    rng = np.random.default_rng(seed)
    return [
        [
            [int(k) for k in rng.choice([*range(8), 100 * (t % 2), 1000 * t + w], rng.integers(1, 7))]
            for w in range(workers)
        ]
        for t in range(count)
    ]


def batches(steps: Steps, rank: int) -> Iterator[Batch]:
    for step in steps:
        keys = step[rank]
        ids, ones = torch.tensor(keys, dtype=torch.int64), torch.ones(len(keys), dtype=torch.int64)
        yield Batch(KeyedJaggedTensor(["f"], ids, lengths=ones, stride=len(keys)))


def pipeline_of(world: World, schedule: str, size: int, every: int, **options: Any) -> TrainPipeline:
    model = Model()
    return TrainPipeline(
        model,
        torch.optim.SGD(model.parameters(), 0.05),
        RowWiseAdagrad(0.1),
        schedule=schedule,
        group_size=size,
        replicas="average",
        average_every=every,
        world=world,
        **options,
    )


def as_the_oracle(world: World, steps: Steps, schedule: str, size: int, every: int, micros: int) -> None:
    """Compares after all steps, without a last average; `every` may leave some of them unaveraged."""
    pipeline = pipeline_of(world, schedule, size, every, micro_batches=micros)
    keys = sorted({key for step in steps for worker in step for key in worker})
    first = {f"t{d}": dict(zip(keys, pipeline.rows(f"t{d}", np.array(keys)))) for d in DIMS}
    dense = nn.Linear(sum(DIMS), 1).double()
    dense.load_state_dict({name: p.clone() for name, p in pipeline.model.dense.state_dict().items()})
    groups = world.size // size
    expected, rows, sums = oracle(steps, groups, every, first, dense, 0.1, 0.05, 1 / groups)
    data, losses = batches(steps, world.rank), []
    while step := pipeline.progress(data):
        losses.append(step.loss)
    pipeline.settle()
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    mine = world.rank // size
    for store in pipeline.stores:
        (table,) = store.group.tables
        found, slots = store.rows_of(0)
        values, state = store.read(slots)
        for key, value, of in zip(found.tolist(), values, state):
            np.testing.assert_allclose(value, rows[mine][table.name][key], rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(of[0], sums[mine][table.name][key], rtol=1e-12, atol=1e-14)
    for name, parameter in pipeline.model.dense.named_parameters():
        np.testing.assert_allclose(parameter.detach(), dense.state_dict()[name], rtol=1e-12)
    pipeline.close()


@pytest.mark.parametrize(("workers", "size"), [(2, 1), (4, 2), pytest.param(3, 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("every", [1, 3])
def test_oracle(workers: int, size: int, every: int) -> None:
    """Promise: losses, rows, moments and dense parameters are those of M independent trainers averaged every k steps."""
    run(workers, as_the_oracle, drawn(workers), "serial", size, every, 1)
    run(workers, as_the_oracle, drawn(workers, seed=1), "nested", size, every, 2)


def trained(world: World, steps: Steps, schedule: str, size: int, every: int, pauses: list[int], **options: Any) -> Any:
    """Losses, everything on this worker at the end without a last average, and what was averaged.  Evaluates after `pauses`."""
    path = options.pop("disk", None)
    tier = DiskTier(Path(path), 1 << 14) if path else None
    pipeline = pipeline_of(world, schedule, size, every, tier=tier, **options)
    data, losses = batches(steps, world.rank), []
    while step := pipeline.progress(data):
        losses.append((step.loss, step.grad_norm))
        if len(losses) in pauses:
            list(pipeline.evaluate(batches(steps[:1], world.rank)))
            compare_replicas(pipeline, "in the test")
    left, figures = everything(pipeline), pipeline.figures()
    pipeline.close()
    return losses, left, figures["averages"], figures["rows_averaged"], figures["bytes_sent_in_averages"]


def all_schedules(
    world: World, steps: Steps, size: int, every: int, pauses: list[int], options: dict[str, Any]
) -> list[str]:
    """Those that are not serial, bit for bit."""
    serial = trained(world, steps, "serial", size, every, pauses, **options)
    return [s for s in ("dbp", "fwp", "nested") if trained(world, steps, s, size, every, pauses, **options) != serial]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"micro_batches": 3},
    "early retrieve": {"early_retrieve": True, "micro_batches": 2},
    "clipped": {"clip_norm": 0.3},
    "stamps": {"check_staleness": True, "early_retrieve": True},
}


@pytest.mark.parametrize(
    "options", ["plain", *(pytest.param(o, marks=pytest.mark.slow) for o in OPTIONS if o != "plain")]
)
@pytest.mark.parametrize(("workers", "size"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_schedules(workers: int, size: int, options: str) -> None:
    """Promise: every schedule is serial of the same groups and averaging, bit for bit, evaluations in between included."""
    for every, pauses in ((1, []), (3, []), (3, [1, 5, 6]), (100, [4])):
        found = run(workers, all_schedules, drawn(workers), size, every, pauses, OPTIONS[options])
        assert found == [[]] * workers, (every, pauses)


def test_schedules_on_disk(tmp_path: Path) -> None:
    """Promise: a disk tier changes nothing."""
    found = run(2, all_schedules, drawn(2), 1, 3, [5], {"disk": str(tmp_path)})
    assert found == [[], []]


def buffers_of(world: World, early: bool) -> list[int]:
    """Row buffers per group after 12 batches of the same keys."""
    pipeline = pipeline_of(world, "nested", 1, 2, early_retrieve=early)
    data = batches([[[1, 2, 3, 4]] * 2] * 12, world.rank)
    while pipeline.progress(data):
        pass
    found = [pool.bytes // (5 * pool.row_bytes) for pool in pipeline.sparse.buffers.pools]  # 4 rows, and room
    pipeline.close()
    return found


@pytest.mark.parametrize("early", [False, True])
def test_buffers_return_to_their_pool(early: bool) -> None:
    """Promise: a batch that nobody behind an average reads frees its buffer: there are never more than without averages."""
    for found in run(2, buffers_of, early):
        assert max(found) <= (3 if early else 2)


def apart(world: World, steps: Steps) -> tuple[bool, bool, list[Any]]:
    """Whether replicas differ after 5 steps of k = 3, whether they do after 6, and what an average sent by then."""
    pipeline = pipeline_of(world, "nested", 1, 3)
    data = batches(steps, world.rank)
    found = []
    for count in (5, 1):
        for _ in range(count):
            pipeline.progress(data)
        pipeline.settle()
        try:
            compare_replicas(pipeline, "in the test")
            found.append(False)
        except ReplicasDiffer:
            found.append(True)
    figures = pipeline.figures()
    pipeline.close()
    return found[0], found[1], [figures["averages"], figures["rows_averaged"], figures["bytes_sent_in_averages"]]


def test_replicas_are_equal_after_an_average() -> None:
    """Promise: replicas hold the same rows, bit for bit, right after an average and not before, and only changed rows travel."""
    steps = drawn(3, 6)
    for between, after, (averages, rows, sent) in run(3, apart, steps):
        assert between and not after
        changed = [{key for step in steps[at : at + 3] for worker in step for key in worker} for at in (0, 3)]
        assert averages == 2 and rows == len(DIMS) * sum(map(len, changed))
        assert sent > 0


def bytes_of_average(world: World, steps: Steps) -> tuple[int, int]:
    pipeline = pipeline_of(world, "serial", 1, 2)
    data = batches(steps, world.rank)
    while pipeline.progress(data):
        pass
    found = pipeline.figures()
    pipeline.close()
    return found["bytes_sent_in_averages"], found["bytes_sent_to_other_groups"]


def test_traffic() -> None:
    """Promise: what an average sends is counted, and is what counting says: keys, and each row's part twice over M - 1 peers."""
    steps = drawn(2, 2)
    found = run(2, bytes_of_average, steps)
    for rank, (sent, between) in enumerate(found):
        mine = len({key for step in steps for key in step[rank]})
        union = len({key for step in steps for worker in step for key in worker})
        half = union // 2 + (rank < union % 2)
        rows = sum((union - half) * (d + 1) * 8 + half * (d + 1) * 8 for d in DIMS)
        assert sent == len(DIMS) * (8 + 16 * mine) + rows
        assert between > sent  # counts of each batch and dense gradients


def resumed(world: World, steps: Steps, schedule: str, every: int, folder: str) -> tuple[str, str]:
    """Digests: of a run with checkpoints after steps 4 and 6, and of one that was restored from the first."""
    whole = pipeline_of(world, schedule, world.size // 2, every)
    writer = CheckpointWriter(whole, Folder(Path(folder)), keep=9)
    data = batches(steps, world.rank)
    while whole.progress(data):
        if whole.next_batch in (4, 6):
            writer.save({}, {})
    writer.wait()
    first = digest(whole)
    whole.close()
    again = pipeline_of(world, schedule, world.size // 2, every)
    there = Folder(Path(folder))
    last = there.find(4)
    assert last is not None
    restore(again, there.chain(last))
    data = batches(steps[4:], world.rank)
    while again.progress(data):
        if again.next_batch == 6:
            again.refresh()  # as the checkpoint did
    second = digest(again)
    again.close()
    return first, second


@pytest.mark.parametrize("every", [2, 3])
@pytest.mark.parametrize("schedule", ["serial", "nested"])
def test_resume(tmp_path: Path, schedule: str, every: int) -> None:
    """Promise: a checkpoint holds one copy, and a resumed run ends with the bits of the uninterrupted one, whatever k."""
    for first, second in run(2, resumed, drawn(2), schedule, every, str(tmp_path / "two")):
        assert first == second


def refusals(world: World) -> list[str]:
    found = []
    for optimizer, table in ((SGD(0.1), {}), (RowWiseAdagrad(0.1), {"eviction": EvictionPolicy(max_rows=100)})):
        with pytest.raises(ValueError) as error:
            TrainPipeline(Model(**table), None, optimizer, group_size=1, replicas="average", world=world)
        found.append(str(error.value))
    return found


def test_refused() -> None:
    """Promise: what cannot be averaged is refused in one line that names the key to change."""
    for optimizer, eviction in run(2, refusals):
        assert "tables.optimizer = 'rowwise_adagrad'" in optimizer and "\n" not in optimizer
        assert "tables.max_rows" in eviction and "\n" not in eviction


@pytest.mark.parametrize(
    ("key", "value"), [("replicas", "both"), ("average_every", 0), ("average_every", True), ("moment_scale", 0.0)]
)
def test_wrong_settings(key: str, value: Any) -> None:
    """Promise: a wrong setting is refused by its name."""
    with pytest.raises(ValueError, match=f"pipeline.{key}"):
        PipelineConfig(**{key: value})


def one_group(world: World) -> tuple[bool, Any]:
    """Averaging of one group against exact: digests equal, nothing to tell."""
    digests = []
    for replicas in ("average", "exact"):
        model = Model()
        pipeline = TrainPipeline(model, None, SGD(0.1), replicas=replicas, world=world)
        data = batches(drawn(world.size, 3), world.rank)
        while pipeline.progress(data):
            pass
        digests.append(digest(pipeline))
        told = pipeline.inexact
        pipeline.close()
    return digests[0] == digests[1], told


def test_one_group_is_exact() -> None:
    """Promise: with one group there is nothing to average, so it is synchronous training with any optimizer."""
    assert run(2, one_group) == [(True, None)] * 2


def fetching_once(world: World) -> list[str]:
    """Schedules that are serial no more where prepared rows are not fetched again."""
    steps = drawn(2)
    serial = trained(world, steps, "serial", 1, 3, [5])
    whole = TrainPipeline.unite
    TrainPipeline.unite = _only_average  # type: ignore[method-assign]
    try:
        return [s for s in ("dbp", "nested") if trained(world, steps, s, 1, 3, [5])[:2] != serial[:2]]
    finally:
        TrainPipeline.unite = whole  # type: ignore[method-assign]


def _only_average(pipeline: TrainPipeline) -> None:
    pipeline.settle()
    if pipeline._averaged_at != pipeline.next_batch:
        pipeline.sparse.average()
        pipeline._averaged_at = pipeline.next_batch


def test_a_mutation_is_noticed() -> None:
    """Promise: rows that were retrieved before an average out of turn and used after it show."""
    assert run(2, fetching_once) == [["dbp", "nested"]] * 2
