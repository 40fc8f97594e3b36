"""The step boundary: buckets summed as soon as they are final, rows updated before the outcome.  The same bits, sooner."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from test_schedules import COMMON, Steps, batches
from torch import Tensor, nn

from happened import Happened
from nestpipe import (
    SGD,
    Batch,
    DeferredStack,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    RowWiseAdagrad,
    TrainPipeline,
    World,
)
from nestpipe.dense import replica as dense
from nestpipe.dense.backward_watch import BackwardWatch
from nestpipe.dense.replica import Bucket
from nestpipe.engine.interpreter import StageFunction
from nestpipe.engine.lanes import LaneThread
from nestpipe.pipeline import NotFinite
from nestpipe.sparse.batch_context import BatchContext
from training import Setting, everything, make_pipeline, my_batches
from workers import run, run_once


class Deep(nn.Module):
    """Five layers, so that there are buckets; `poison` is called with the first hidden layer and the batch's first key."""

    def __init__(self, poison: Callable[[Tensor, int], Tensor] | None = None) -> None:
        super().__init__()
        self.sparse = EmbeddingBagCollection([EmbeddingBagConfig("t", 4, ["f"], init_scale=1.0)])
        torch.manual_seed(5)
        self.layers = DeferredStack(*[nn.Linear(4, 4) for _ in range(5)])
        self.poison = poison

    def forward(self, batch: Batch) -> tuple[Tensor, None]:
        hidden = self.sparse(batch.sparse_features).values()
        if self.poison is not None:
            hidden = self.poison(hidden, int(batch.sparse_features.values()[0]))
        return self.layers(hidden).tanh().square().mean(), None


@contextmanager
def small_buckets() -> Iterator[None]:
    """Every layer gets a bucket of its own."""
    kept = dense.LEAST_BYTES, dense.BUCKETS
    dense.LEAST_BYTES, dense.BUCKETS = 4, 100
    try:
        yield
    finally:
        dense.LEAST_BYTES, dense.BUCKETS = kept


def make(
    world: World, schedule: str, micro_batches: int, model: nn.Module | None = None, **options: Any
) -> TrainPipeline:
    model = model or Deep()
    with small_buckets():
        pipeline = TrainPipeline(
            model,
            torch.optim.Adam(model.parameters(), 0.1),
            RowWiseAdagrad(0.1),
            schedule=schedule,
            micro_batches=micro_batches,
            world=world,
            **options,
        )
    assert len(pipeline.dense.buckets) > 2
    return pipeline


def trained(
    world: World,
    steps: Steps,
    schedule: str,
    micro_batches: int,
    poison: Callable[[TrainPipeline], None] | None = None,
    **options: Any,
) -> tuple[dict[str, bytes], list[float]]:
    pipeline = make(world, schedule, micro_batches, **options)
    if poison is not None:
        poison(pipeline)
    data = batches(steps, world.rank)
    losses = []
    while step := pipeline.progress(data):
        losses.append(step.loss)
    left = everything(pipeline)
    pipeline.close()
    return left, losses


STEPS: Steps = [[[1, 2, 3, 10 + t], [2, 3, 4, 30 + t], [] if t == 3 else [1, 5 + t % 2, 50 + t]] for t in range(7)]


def all_equal(
    world: World, schedule: str, micro_batches: int, clip_norm: float | None, defer_weight_grads: bool
) -> bool:
    wanted = trained(world, STEPS, "serial", micro_batches, clip_norm=clip_norm, defer_weight_grads=defer_weight_grads)
    return all(
        wanted
        == trained(
            world,
            STEPS,
            schedule,
            micro_batches,
            clip_norm=clip_norm,
            early_reduce=early_reduce,
            early_update=early_update,
            look_ahead=look_ahead,
            early_prepare=early_prepare,
            early_retrieve=early_retrieve,
            defer_weight_grads=defer_weight_grads,
        )
        for early_reduce in (False, True)
        for early_update in (False, True)
        for look_ahead, early_prepare, early_retrieve in ((0, True, True), (5, False, False))
    )


@pytest.mark.slow
@pytest.mark.parametrize("clip_norm, defer_weight_grads", [(None, True), (0.05, True), (None, False)])
@pytest.mark.parametrize("schedule, micro_batches", [("dbp", 1), ("fwp", 4), ("nested", 4)])
def test_boundary_options_change_no_bit(
    schedule: str, micro_batches: int, clip_norm: float | None, defer_weight_grads: bool
) -> None:
    """Promise: early or late, on three workers (where the order of sums matters), with and without clipping."""
    assert all(run(3, all_equal, schedule, micro_batches, clip_norm, defer_weight_grads))


def told_too_early(pipeline: TrainPipeline) -> None:
    """All buckets are called final when the last backward pass begins; gradients take a moment."""
    watching = BackwardWatch.watching

    @contextmanager
    def at_once(self: BackwardWatch, events: list[threading.Event]) -> Iterator[None]:
        for event in events:
            event.set()
        time.sleep(0.02)
        with watching(self, [threading.Event() for _ in events]):
            yield

    pipeline._stages.watch.watching = at_once.__get__(pipeline._stages.watch)  # type: ignore[union-attr]


def called_made_too_early(pipeline: TrainPipeline) -> None:
    """All buckets are called final when `weight_grad` begins."""
    late = pipeline._stages.deferred
    assert late is not None
    make_them = late.make

    def at_once(buckets: Sequence[Bucket], made: Callable[[int], None]) -> None:
        for bucket in range(len(buckets)):
            made(bucket)
        time.sleep(0.02)
        make_them(buckets, lambda bucket: None)

    late.make = at_once  # type: ignore[method-assign]


def differs(world: World, defer_weight_grads: bool) -> bool:
    poison = called_made_too_early if defer_weight_grads else told_too_early
    wanted = trained(world, COMMON, "serial", 2, defer_weight_grads=defer_weight_grads)
    return wanted != trained(world, COMMON, "nested", 2, poison, defer_weight_grads=defer_weight_grads)


@pytest.mark.slow
@pytest.mark.parametrize("defer_weight_grads", [False, True])
def test_a_bucket_summed_before_it_is_final_changes_the_result(defer_weight_grads: bool) -> None:
    """The comparison above is able to fail."""
    assert any(run(2, differs, defer_weight_grads))


def overlap(world: World) -> list[bool]:
    """The last backward pass of each batch waits until the first bucket's sum has begun: whether it has."""
    begun, now, met = Happened(), [0, 0], []

    def held(hidden: Tensor, key: int) -> Tensor:
        hidden = hidden.clone()
        hidden.register_hook(lambda grad: met.append(begun.wait_for(now[0])) if now[1] == 1 else None)
        return hidden

    pipeline = make(world, "nested", 2, Deep(held), defer_weight_grads=False)
    compute, reduce = (pipeline.engine.stage(name) for name in ("compute", "reduce"))

    def computing(context: BatchContext, micro: int) -> None:
        now[:] = context.number, micro
        compute(context, micro)

    def reducing(context: BatchContext, bucket: int) -> None:
        begun.add(context.number)
        reduce(context, bucket)

    pipeline.engine.replace(compute=computing, reduce=reducing)
    data = batches(COMMON, world.rank)
    while pipeline.progress(data):
        pass
    pipeline.close()
    return met


def test_buckets_leave_inside_the_last_backward_pass() -> None:
    """Promise: what the backward pass has finished is on its way while it goes on."""
    for met in run(2, overlap):
        assert met == [True] * len(COMMON)


def travels_meanwhile(world: World) -> list[bool]:
    """The last weights of each batch wait for row gradients, a bucket and the next rows: whether all of these have travelled."""
    pipeline = make(world, "nested", 2)
    late = pipeline._stages.deferred
    assert late is not None
    make_them = late.make
    done, now, met = Happened(), [0], []

    def then_done(stage: str) -> StageFunction:
        function = pipeline.engine.stage(stage)

        def perform(context: BatchContext, micro: int) -> None:
            now[0] = context.number if stage == "weight_grad" else now[0]
            function(context, micro)
            done.add((stage, context.number, micro))

        return perform

    def held(buckets: Sequence[Bucket], made: Callable[[int], None]) -> None:
        left = list(range(len(buckets)))

        def but_the_last_waits(bucket: int) -> None:
            left.remove(bucket)
            if not left:
                t = now[0]
                early = [("grad", t, 1), ("reduce", t, 0), ("update", t, -1), ("embed", t + 1, 0)]
                early = early[:-1] if t == len(COMMON) - 1 else early
                met.append(all(done.wait_for(name) for name in early))
            made(bucket)

        make_them(buckets, but_the_last_waits)

    late.make = held  # type: ignore[method-assign]
    pipeline.engine.replace(
        **{stage: then_done(stage) for stage in ("grad", "reduce", "update", "embed", "weight_grad")}
    )
    data = batches(COMMON, world.rank)
    while pipeline.progress(data):
        pass
    pipeline.close()
    return met


def test_rows_travel_while_weights_are_made() -> None:
    """Promise: the last gradients arrive, rows are updated and the next batch's first ones leave under `weights`."""
    for met in run(2, travels_meanwhile):
        assert met == [True] * len(COMMON)


def twice(world: World, schedule: str, defer_weight_grads: bool) -> str:
    """A model that runs a backward pass of its own within its forward pass's graph."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
            ctx.save_for_backward(x)
            ctx.layer = layer
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                ctx.layer(x.detach()).sum().backward()
            return grads[0], None

    model = Deep()
    model.poison = lambda hidden, key: Again.apply(hidden, model.layers[0])  # type: ignore[no-untyped-call]
    pipeline = make(world, schedule, 1, model, defer_weight_grads=defer_weight_grads)
    data = batches(COMMON, world.rank)
    try:
        while pipeline.progress(data):
            pass
    except RuntimeError as error:
        return str(error)
    return str([p.detach().numpy().tobytes() for p in model.parameters()])


def test_a_backward_pass_inside_another_is_refused() -> None:
    """Its gradients come after they were called final: noticed, with what to do."""
    assert "pipeline.early_reduce = false" in run(1, twice, "nested", False)[0]


def test_a_backward_pass_inside_another_may_leave_its_weights_for_later() -> None:
    """Where weights wait for the end of the batch, nothing was called final before."""
    assert run(2, twice, "nested", True) == run(2, twice, "serial", True)


BAD = 3
"""The batch whose loss is not finite."""


def rows_after(world: World, schedule: str, count: int) -> tuple[bytes, bytes, str]:
    """Rows and their state in this worker's tables after so many batches, and what the bad one raised."""

    def poison(hidden: Tensor, key: int) -> Tensor:
        return hidden * float("nan") if key == 700 else hidden

    steps: Steps = [[[1, 2, 3], [2, 3, 4]] for _ in range(6)]
    steps[BAD] = [[700, 1, 2], [1, 2, 5]]
    pipeline = make(world, schedule, 2, Deep(poison))
    data, message = batches(steps[:count], world.rank), ""
    try:
        while pipeline.progress(data):
            pass
    except NotFinite as error:
        message = str(error)
    pipeline.engine._wait()
    values, state = np.zeros((6, 4), np.float32), np.zeros((6, 1), np.float32)
    pipeline.sparse.stores[0].retrieve(np.zeros(6, np.uint16), np.arange(6), values, state)
    return values.tobytes(), state.tobytes(), message


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["dbp", "fwp", "nested"])
def test_nothing_of_a_bad_batch_reaches_the_tables(schedule: str) -> None:
    """Promise: rows in the batch's own buffer may be updated before all workers have agreed, the tables never.  What came before
    is in the tables, and no worker waits for another that has stopped."""
    # Whoever waited for another would still wait when the test has ended.
    spoilt = run_once(2, rows_after, schedule, 6, timeout=600, deadline=60)
    for (*found, message), (*wanted, _) in zip(spoilt, run(2, rows_after, "serial", BAD)):
        assert found == wanted and f"batch {BAD}: the loss is not finite" in message


def clamped(world: World, defer_weight_grads: bool) -> bool:
    """Whether a hook that the user adds after the pipeline is made has had its say before gradients are summed."""
    results = []
    for schedule in ("serial", "nested"):
        pipeline = make(world, schedule, 2, defer_weight_grads=defer_weight_grads)
        for parameter in pipeline.model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: (time.sleep(0.005), p.grad.clamp_(-1e-3, 1e-3))[0])
        data = batches(COMMON, world.rank)
        while pipeline.progress(data):
            pass
        results.append([p.detach().numpy().tobytes() for p in pipeline.model.parameters()])
        pipeline.close()
    return results[0] == results[1]


@pytest.mark.slow
@pytest.mark.parametrize("defer_weight_grads", [False, True])
def test_hooks_of_the_user_come_before_the_sum(defer_weight_grads: bool) -> None:
    """Promise: a bucket is final when everybody who may change it has been asked."""
    assert all(run(2, clamped, defer_weight_grads))


@pytest.mark.slow
def test_a_batch_that_was_skipped_is_not_expected_to_have_written() -> None:
    """With --check staleness: going on after a bad batch is no stale read."""
    model = Deep(lambda hidden, key: hidden * float("nan") if key == 700 else hidden)
    pipeline = make(World.single(), "serial", 1, model, check_staleness=True)
    data = batches([[[1, 2]], [[700, 1]], [[1, 2, 700]], [[1, 700]]], 0)
    assert pipeline.progress(data)
    with pytest.raises(NotFinite):
        pipeline.progress(data)
    assert pipeline.progress(data)
    pipeline.close()


def test_batchnorm_is_refused_with_micro_batches() -> None:
    """Promise: found when the pipeline is built, and the line says what to do."""
    model = Deep()
    model.layers.append(nn.BatchNorm1d(4))
    with pytest.raises(
        ValueError, match=r"BatchNorm1d at 'layers\.5' mixes the samples .* or pipeline\.micro_batches = 1"
    ):
        make(World.single(), "serial", 2, model)
    make(World.single(), "serial", 1, model).close()


def test_a_failed_pass_leaves_no_lane_waiting() -> None:
    """An error inside the last backward pass ends the run; the lane that waits for its buckets ends, too."""

    def fail(hidden: Tensor, key: int) -> Tensor:
        hidden = hidden.clone()
        hidden.register_hook(lambda grad: _raise())
        return hidden

    before = {*threading.enumerate()}
    pipeline = make(World.single(), "nested", 2, Deep(fail))
    with pytest.raises(ZeroDivisionError):
        pipeline.progress(batches([[[1, 2]]], 0))
    assert {*threading.enumerate()} > before, "the lanes"
    pipeline.close()
    assert {*threading.enumerate()} <= before


def _raise() -> None:
    raise ZeroDivisionError


def test_an_interrupt_while_actions_are_issued_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: Ctrl-C between noting an action and giving it to its lane does not make `close` wait for ever."""
    setting = Setting("dlrm", SGD(), micro_batches=2, steps=6, schedule="nested")
    pipeline = make_pipeline(World.single(), setting)
    batches = my_batches(World.single(), setting)
    pipeline.progress(batches)
    submit, left = LaneThread.submit, [2]

    def interrupted(lane: LaneThread, job: Callable[[], None]) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        submit(lane, job)

    monkeypatch.setattr(LaneThread, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipeline.progress(batches)

    def close() -> None:
        with contextlib.suppress(KeyboardInterrupt):  # told before by `progress`, and to a thread nobody listens to
            pipeline.close()

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
