"""The pipeline's own promises: when it stops, what it refuses, and what it leaves alone."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oracle
import samples
from nestpipe import (
    SGD,
    Adagrad,
    Adam,
    Batch,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PipelineConfig,
    TrainPipeline,
    World,
)
from nestpipe.comm.exchange import Exchange
from nestpipe.pipeline import NotFinite
from nestpipe.schedule import EXACT
from nestpipe.sparse.walk import walk
from oracle import Trained, distance
from training import Part, Setting, everything, joined, make_pipeline, my_batches, train, train_all
from workers import run


def one_feature(*lists: list[int]) -> Batch:
    """A batch of one feature "f", one list of ids per sample."""
    return Batch(
        KeyedJaggedTensor(
            ["f"],
            torch.tensor([i for ids in lists for i in ids], dtype=torch.int64),
            lengths=torch.tensor([len(ids) for ids in lists], dtype=torch.int64),
            stride=len(lists),
        )
    )


class Small(nn.Module):
    """Mean over samples of (w * sum of the pooled row)^2; `poison` may change the loss."""

    def __init__(self, poison: Callable[[Tensor, Batch], Any] | None = None, optimizer: Any = None) -> None:
        super().__init__()
        self.sparse = EmbeddingBagCollection(
            [EmbeddingBagConfig("t", 3, ["f"], dtype="float64", init_scale=1.0, optimizer=optimizer)]
        )
        self.w = nn.Parameter(torch.full((1,), 1.5, dtype=torch.float64))
        self.unused = nn.Parameter(torch.full((2,), 7.0, dtype=torch.float64))
        self.poison = poison

    def forward(self, batch: Batch) -> Any:
        loss = (self.w * self.sparse(batch.sparse_features).values().sum(1)).square().mean()
        return self.poison(loss, batch) if self.poison else (loss, len(batch))


def small_pipeline(world: World, poison: Callable[[Tensor, Batch], Any] | None = None, **options: Any) -> TrainPipeline:
    model = Small(poison)
    given = {"sparse_optimizer": Adam(lr=0.1), "world": world} | options
    return TrainPipeline(model, torch.optim.Adam(model.parameters(), lr=0.1), **given)


# The end of the data


def train_uneven(
    world: World, counts: list[int], micro_batches: int
) -> tuple[list[tuple[int, int]], list[int], bool, int]:
    pipeline = small_pipeline(world, micro_batches=micro_batches)
    batches = iter([one_feature([world.rank, 9], [n]) for n in range(counts[world.rank])])
    steps, outputs = [], []
    while (step := pipeline.progress(batches)) is not None:
        steps.append((step.batch, step.samples))
        outputs.append(sum(o or 0 for o in step.outputs))
    again = pipeline.progress(batches) is None
    return steps, outputs, again, pipeline.next_batch


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_workers_agree_on_the_end_of_the_data(micro_batches: int) -> None:
    """Promise: workers with 3, 0 and 7 batches all take 7 steps and end together; who has no data joins with nothing."""
    counts = [3, 0, 7]
    results = run(3, train_uneven, counts, micro_batches)
    for rank, (steps, outputs, again, next_batch) in enumerate(results):
        assert steps == [(n, 2 * sum(n < count for count in counts)) for n in range(7)]
        assert outputs == [2 if n < counts[rank] else 0 for n in range(7)]
        assert again and next_batch == 7


def train_epochs(world: World, schedule: str) -> tuple[list[int], list[float], list[float]]:
    pipeline = small_pipeline(world, schedule=schedule, micro_batches=2)
    once = small_pipeline(world, micro_batches=2)
    counts, losses, wanted = [], [], []
    epochs = [[one_feature([1, world.rank], [n]) for n in range(count)] for count in (3, 0, 2)]
    for epoch in epochs:
        batches = iter(epoch)
        while (step := pipeline.progress(batches)) is not None:
            counts.append(step.batch)
            losses.append(step.loss)
    everything_at_once = iter([batch for epoch in epochs for batch in epoch])
    while (step := once.progress(everything_at_once)) is not None:
        wanted.append(step.loss)
    pipeline.close()
    return counts, losses, wanted


@pytest.mark.slow
@pytest.mark.parametrize("schedule", EXACT)
@pytest.mark.parametrize("workers", [1, 2])
def test_epochs_go_on_with_a_new_iterator(workers: int, schedule: str) -> None:
    """Promise: after the data has ended, progress goes on with a new iterator, as if the data had never ended."""
    for counts, losses, wanted in run(workers, train_epochs, schedule):
        assert counts == [0, 1, 2, 3, 4] and losses == wanted


def train_on_nothing(world: World) -> tuple[object, dict[str, bytes], bool]:
    pipeline = small_pipeline(world)
    before = everything(pipeline)
    return pipeline.progress(iter([])), before, everything(pipeline) == before


def test_no_data_at_all_trains_nothing() -> None:
    """Promise: where no worker has data, the first progress says so, and nothing has changed."""
    for step, _, unchanged in run(2, train_on_nothing):
        assert step is None and unchanged


def train_on_empty_batches(world: World) -> tuple[list[float], list[int], bytes, bytes]:
    pipeline = small_pipeline(world, sparse_optimizer=SGD(lr=0.1), micro_batches=2)
    first = pipeline.rows("t", np.arange(4)).numpy().tobytes()
    batches = iter([one_feature(), one_feature([], []), one_feature()])
    steps = []
    while (step := pipeline.progress(batches)) is not None:
        steps.append(step)
    assert len(pipeline.sparse.stores[0]) == 0
    rows = pipeline.rows("t", np.arange(4)).numpy().tobytes()
    return [s.loss for s in steps], [s.samples for s in steps], first, rows


@pytest.mark.parametrize("workers", [1, 2])
def test_empty_batches_are_steps_without_effect(workers: int) -> None:
    """Promise: batches without samples, or without ids, are steps with loss 0 that create no row."""
    for losses, counts, first, rows in run(workers, train_on_empty_batches):
        assert losses == [0, 0, 0] and counts == [0, 2 * workers, 0] and first == rows


# Numbers that are not finite


def poison(kind: str) -> Callable[[Tensor, Batch], Any]:
    """A model that spoils the batch that holds id 666."""

    def poison(loss: Tensor, batch: Batch) -> tuple[Tensor, int]:
        if 666 in batch.sparse_features.values():
            # "gradient": a finite loss whose gradient is 0 * inf
            loss = loss * math.nan if kind == "loss" else loss + (loss.detach() - loss).clamp(min=0).sqrt()
        return loss, 0

    return poison


def train_poisoned(world: World, victim: int, kind: str, micro_batches: int) -> tuple[list[str], list[str], list[str]]:
    """Two good batches, one in which `victim` has a bad number, one more good one: errors, and what they changed."""
    ids = [[10, 11, 12, 13], [12, 13, 14, 15], [13, 14, 15, 666 if world.rank == victim else 16], [12, 15, 16, 17]]
    good = [ids[0], ids[1], ids[3]]
    pipeline = small_pipeline(world, poison(kind), micro_batches=micro_batches)
    batches = iter([one_feature(*[[i] for i in four]) for four in ids])
    errors, changed = [], []
    for number in range(4):
        before = everything(pipeline)
        try:
            pipeline.progress(batches)
        except NotFinite as error:
            errors.append(f"{number}: {error}")
            after = everything(pipeline)
            changed += [name for name in before if after[name] != before[name]]
    # going on is as if the bad batch had not been there
    without = small_pipeline(world, micro_batches=micro_batches)
    batches = iter([one_feature(*[[i] for i in four]) for four in good])
    while without.progress(batches) is not None:
        pass
    mine, wanted = everything(pipeline), everything(without)
    return errors, changed, [name for name in wanted if mine[name] != wanted[name]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize(("workers", "victim", "micro_batches"), [(1, 0, 1), (2, 1, 2), (3, 1, 1), (3, 2, 4)])
def test_a_bad_number_stops_all_workers_before_anything_changes(
    workers: int, victim: int, micro_batches: int, kind: str
) -> None:
    """Promise: NaN on one worker is NotFinite on all, naming batch and rank, with not a bit updated; one may go on from there."""
    for errors, changed, different in run(workers, train_poisoned, victim, kind, micro_batches):
        assert len(errors) == 1, errors
        assert errors[0].startswith(f"2: batch 2: the {kind} is not finite on rank {victim};")
        assert changed == []
        assert different == []


def train_without_terms(world: World) -> tuple[list[float], bool]:
    """Sample 2 has no loss terms, and a model whose mean over no terms is 0 / 0."""

    class Masked(Small):
        def forward(self, batch: Batch) -> Any:
            assert batch.loss_terms is not None
            each = (self.w * self.sparse(batch.sparse_features).values().sum(1)).square()
            return (each * batch.loss_terms).sum() / batch.loss_terms.sum(), 0

    found = []
    for micro_batches in (1, 3):
        model = Masked()
        pipeline = TrainPipeline(model, None, SGD(0.1), micro_batches=micro_batches, world=world)
        batch = one_feature([1], [2], [3])
        batch.loss_terms = torch.tensor([1.0, 2.0, 0.0])
        step = pipeline.progress(iter([batch]))
        assert step is not None
        found.append((step.loss, pipeline.rows("t", np.arange(5))))
    return [loss for loss, _ in found], bool(torch.allclose(found[0][1], found[1][1], rtol=1e-13, atol=0))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_micro_batch_without_loss_terms_does_not_count(workers: int) -> None:
    """Promise: a micro-batch that has samples but no loss terms takes no part in the mean, even where its own is NaN."""
    for losses, same in run(workers, train_without_terms):
        assert losses[0] == pytest.approx(losses[1], rel=1e-13) and same


# Clipping and rates


CLIPPED = [
    Setting(m, o, n, steps=6, clip_norm=0.05) for m in samples.MODELS for o, n in [(SGD(0.5), 1), (Adagrad(0.1), 4)]
]
RATED = [
    Setting(m, o, 2, steps=6, warm_up=4) for m, o in [("dlrm", SGD(0.5)), ("dlrm", Adam(0.1)), ("hstu", Adagrad(0.1))]
]


def wanted_of(setting: Setting, part: Part) -> Trained:
    model = samples.model(setting.model, setting.dtype)
    model.load_state_dict(part.first_dense)
    batches = [samples.batch(setting.model, b, setting.dtype) for b in setting.batches()]
    rates = (setting.rate, setting.rate)
    return oracle.train(
        model, part.first_rows, batches, setting.optimizer, setting.dense_optimizer, setting.clip_norm, *rates
    )


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("what", ["clip", "rates"])
def test_clipping_and_rates_are_torchs(workers: int, what: str) -> None:
    """Promise: clip_norm is clip_grad_norm_ over dense and table gradients together; rates scale both learning rates."""
    chosen = CLIPPED if what == "clip" else RATED
    by_rank = run(workers, train_all, chosen)
    for at, setting in enumerate(chosen):
        found = joined([parts[at] for parts in by_rank])
        wanted = wanted_of(setting, by_rank[0][at])
        if what == "clip":
            assert distance(np.array(found.norms), np.array(wanted.norms)) <= 1e-9
            assert sum(norm > 0.05 for norm in wanted.norms) >= 4, "most steps are clipped"
        assert found.losses == pytest.approx(wanted.losses, rel=1e-9)
        for name in wanted.rows:
            assert distance(found.rows[name], wanted.rows[name]) <= 1e-9
        for name in wanted.dense:
            assert distance(found.dense[name], wanted.dense[name]) <= 1e-9


def test_a_norm_below_the_limit_is_left_alone() -> None:
    """Promise: clipping does nothing, to the bit, where the norm is below the limit."""
    plain, clipped = (train(World.single(), Setting("dlrm", SGD(0.1), 2, 4, clip_norm=c)) for c in (None, 1e6))
    assert plain.trained.losses == clipped.trained.losses and plain.norms == clipped.norms


def test_every_table_may_have_its_own_optimizer() -> None:
    """Promise: a table's own optimizer comes before the pipeline's."""
    rows = {}
    for own in (None, SGD(0.0)):
        pipeline = TrainPipeline(Small(optimizer=own), None, SGD(1.0), world=World.single())
        first = pipeline.rows("t", np.array([1, 2]))
        pipeline.progress(iter([one_feature([1], [2])]))
        rows[own] = torch.equal(first, pipeline.rows("t", np.array([1, 2])))
    assert rows == {None: False, SGD(0.0): True}


# What the pipeline leaves alone, and what it refuses


def test_a_parameter_that_no_batch_uses_stays() -> None:
    """Promise: it has gradient 0, so Adam leaves it as it is."""
    pipeline = small_pipeline(World.single())
    pipeline.progress(iter([one_feature([1])]))
    assert torch.equal(pipeline.model.unused, torch.full((2,), 7.0, dtype=torch.float64))
    assert pipeline.model.unused.grad is not None and not pipeline.model.unused.grad.any()


class NoTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, batch: Batch) -> tuple[Tensor, None]:
        return (self.w - len(batch)).square().sum(), None


def test_a_model_without_tables_trains() -> None:
    """Promise: a purely dense model is trained too."""
    model = NoTables()
    pipeline = TrainPipeline(model, torch.optim.SGD(model.parameters(), lr=0.25), world=World.single())
    step = pipeline.progress(iter([one_feature([1], [2], [3])]))
    assert step is not None and step.loss == 4.0 and float(model.w.detach()) == 2.0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda loss, batch: loss,
        lambda loss, batch: (float(loss.detach()), None),
        lambda loss, batch: (loss.expand(2), None),
        lambda loss, batch: (loss, None, None),
        lambda loss, batch: {"loss": loss},
        lambda loss, batch: None,
    ],
)
def test_a_model_that_returns_something_else_is_told(wrong: Callable[[Tensor, Batch], Any]) -> None:
    """Promise: whatever a model returns beside (loss, outputs), the error says what it should, at which stage and batch."""
    with pytest.raises(TypeError, match=r"must return \(loss, outputs\) with a loss of one number") as error:
        small_pipeline(World.single(), wrong).progress(iter([one_feature([1])]))
    assert error.value.__notes__ == ["rank 0, compute of batch 0"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "sideways"}, r"pipeline\.schedule must be one of serial.*not 'sideways'"),
        ({"micro_batches": 0}, r"pipeline\.micro_batches must be from 1 to 32767, .* not 0"),
        ({"micro_batches": -3}, r"pipeline\.micro_batches must be .*-3"),
        ({"micro_batches": 40_000}, r"pipeline\.micro_batches must be .*40000"),
        ({"clip_norm": 0.0}, r"train\.clip_norm must be above 0 and finite, not 0"),
        ({"clip_norm": math.nan}, r"train\.clip_norm must be above 0 and finite, not nan"),
        ({"clip_norm": math.inf}, r"train\.clip_norm must be above 0 and finite, not inf"),
        ({"buffer_limit": -1}, r"memory\.buffer_limit must be above 0 and finite, not -1"),
        ({"window_limit": 0}, r"memory\.window_limit must be above 0 and finite, not 0"),
        ({"precision": "fp8"}, r"train\.precision must be one of float32, bf16, not 'fp8'"),
    ],
)
def test_bad_settings_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    """Promise: an impossible setting is refused when the pipeline is made, by its name."""
    with pytest.raises(ValueError, match=message):
        small_pipeline(World.single(), **options)


def test_progress_wants_an_iterator() -> None:
    """Promise: a list, which would start over with every step, is refused."""
    with pytest.raises(TypeError, match=r"iterator of batches, not list: pass iter\(\.\.\.\) of it"):
        small_pipeline(World.single()).progress([one_feature([1])])  # type: ignore[arg-type]


def test_gradients_belong_to_the_pipeline() -> None:
    """Promise: a model that drops or replaces .grad during the batch is told, instead of training without it."""

    def replacing(loss: Tensor, batch: Batch) -> tuple[Tensor, None]:
        pipeline.model.w.grad = torch.ones(1, dtype=torch.float64)
        return loss, None

    def dropping(loss: Tensor, batch: Batch) -> tuple[Tensor, None]:
        pipeline.model.zero_grad(set_to_none=True)
        return loss.detach(), None

    for poison in (replacing, dropping):
        pipeline = small_pipeline(World.single(), poison)
        with pytest.raises(RuntimeError, match=r"leave zero_grad\(\) and \.grad to the pipeline"):
            pipeline.progress(iter([one_feature([1])]))


def test_an_error_in_the_model_says_where() -> None:
    """Promise: an exception of the user's model passes through unchanged, with a note of rank, stage and batch."""

    def failing(loss: Tensor, batch: Batch) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as error:
        small_pipeline(World.single(), failing).progress(iter([one_feature([1])]))
    assert error.value.__notes__ == ["rank 0, compute of batch 0"]


# Evaluation and rows


def evaluate_uneven(world: World, counts: list[int]) -> tuple[list[int], list[str], bool, float]:
    setting = Setting("dlrm", Adam(0.1), 2, 3)
    pipeline = make_pipeline(world, setting)
    batches = my_batches(world, setting)
    while pipeline.progress(batches) is not None:
        pass
    before = everything(pipeline)
    mine = [samples.batch("dlrm", b, "float64") for b in samples.drawn("dlrm", counts[world.rank], seed=5)]
    found = [outputs for _, outputs in pipeline.evaluate(iter(mine))]
    after = everything(pipeline)
    # the oracle, alone, with the same rows
    keys = samples.keys_of("dlrm", samples.drawn("dlrm", counts[world.rank], seed=5))
    rows = {table: (k, pipeline.rows(table, k)) for table, k in keys.items()}
    model = samples.model("dlrm", "float64")
    model.load_state_dict(pipeline.model.state_dict())
    model.sparse = oracle.OracleBags(model.sparse, rows, sparse_grads=False)
    with torch.no_grad():
        wrong = max([float((model(b)[1] - o).abs().max()) for b, o in zip(mine, found)], default=0.0)
    changed = [name for name in before if after[name] != before[name]]
    return [len(outputs) for outputs in found], changed, pipeline.model.training, wrong


def test_evaluation_with_uneven_data_trains_nothing() -> None:
    """Promise: workers with 3, 0 and 5 batches evaluate without hanging, on the trained rows, and nothing changes."""
    counts = [3, 0, 5]
    for rank, (found, changed, training, wrong) in enumerate(run(3, evaluate_uneven, counts)):
        wanted = [len(b) for b in samples.drawn("dlrm", counts[rank], seed=5)]
        assert found == wanted
        assert changed == [] and training and wrong < 1e-12


def rows_on_demand(world: World) -> list[bool]:
    pipeline = small_pipeline(world, sparse_optimizer=SGD(0.5))
    asked = np.array([5, -7, 5, 2**63 - 1, 40 + world.rank])
    before = pipeline.rows("t", asked)
    created = sum(len(store) for store in pipeline.sparse.stores)
    nothing = pipeline.rows("t", np.empty(0, np.int64))
    pipeline.progress(iter([one_feature([5, -7])]))
    after = pipeline.rows("t", asked)
    mine, _ = pipeline.sparse.stores[0].rows_of(0)
    total = torch.tensor([len(mine)])
    Exchange(world, "dense").all_reduce(total)
    try:
        pipeline.rows("u", asked)
        named = False
    except ValueError as error:
        named = "no table 'u' in this model; it has t" in str(error)
    return [
        created == 0,
        nothing.shape == (0, 3),
        torch.equal(before[0], before[2]),
        not torch.equal(before[:2], after[:2]),
        torch.equal(before[3:], after[3:]),
        int(total) == 2 and set(mine) <= {5, -7},
        named,
    ]


@pytest.mark.parametrize("workers", [1, 3])
def test_rows_of_any_keys_and_only_trained_ones_appear(workers: int) -> None:
    """Promise: rows answers for any keys, repeated or never seen, and creates none; training creates what it touched."""
    for good in run(workers, rows_on_demand):
        assert all(good), good


def walk_everything(world: World) -> tuple[bool, list[tuple[int, ...]]]:
    setting = Setting("dlrm", Adam(0.1), 2, 6)
    pipeline = make_pipeline(world, setting)
    batches = my_batches(world, setting)
    while pipeline.progress(batches) is not None:
        pass
    good, sizes = True, []
    for table in samples.tables("dlrm"):
        wanted = samples.keys_of("dlrm", setting.batches())[table]
        rows = pipeline.rows(table, wanted).numpy()
        group, number = pipeline.place_of(table)
        chunks = list(walk(world, pipeline.stores[group], number, chunk_rows=3))
        sizes.append(tuple(len(keys) for keys, _, _ in chunks))
        if world.rank == 0:
            good = good and np.array_equal(np.concatenate([keys for keys, _, _ in chunks]), wanted)
            good = good and np.array_equal(np.concatenate([values for _, values, _ in chunks]), rows)
            good = good and all(state.shape == (len(keys), 8) for keys, _, state in chunks)
        else:
            good = good and not chunks
    return good, sizes


@pytest.mark.parametrize("workers", [1, 3])
def test_a_walk_meets_every_row_once_in_order(workers: int) -> None:
    """Promise: a walk yields all rows of all workers in order of keys on worker 0, never more than a chunk from each."""
    for good, sizes in run(workers, walk_everything):
        assert good and all(size <= 3 * workers for table in sizes for size in table)


# Messages


def test_a_model_may_be_copied_before_training() -> None:
    """Promise: a collection is an ordinary module: deepcopy gives another that trains by itself."""
    model = Small()
    twin = copy.deepcopy(model)
    rows = []
    for one in (model, twin):
        pipeline = TrainPipeline(one, torch.optim.SGD(one.parameters(), lr=0.1), SGD(0.1), world=World.single())
        pipeline.progress(iter([one_feature([1, 2])]))
        rows.append(pipeline.rows("t", np.array([1, 2])))
    assert torch.equal(*rows)


def forever(batch: Batch) -> Iterator[Batch]:
    while True:
        yield batch


def test_progress_draws_one_batch_per_step() -> None:
    """Promise: progress takes what it needs from an endless iterator and no more."""
    drawn = []

    def counting() -> Iterator[Batch]:
        for batch in forever(one_feature([1])):
            drawn.append(batch)
            yield batch

    pipeline, batches = small_pipeline(World.single()), counting()
    for _ in range(3):
        pipeline.progress(batches)
    assert len(drawn) == 3


def test_batches_are_freed_when_they_are_done() -> None:
    """Promise: nothing of a batch waits for the garbage collector, which may come after gigabytes."""
    batches = (samples.batch("hstu", step) for step in samples.drawn("hstu", 6))
    model = samples.model("hstu", "float32")
    pipeline = TrainPipeline(
        model, torch.optim.SGD(model.parameters(), 0.1), SGD(0.1), PipelineConfig(schedule="nested", micro_batches=2)
    )
    gc.collect()
    gc.disable()
    try:
        while pipeline.progress(batches):
            pass
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kept = [item for item in gc.garbage if isinstance(item, torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
        pipeline.close()
    assert not kept
