"""`TrainPipeline`: a model, its tables and a schedule, stepped by `progress`."""

from __future__ import annotations

import contextlib
import math
import numbers
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestpipe.comm.exchange import Exchange
from nestpipe.comm.world import World
from nestpipe.data.batch import Batch
from nestpipe.data.clustering import cluster, compile_clustering
from nestpipe.dense.backward_watch import BackwardWatch
from nestpipe.dense.replica import DenseReplica
from nestpipe.dense.weight_grads import DeferredWeightGrads
from nestpipe.engine.interpreter import CALLERS_LANE, Engine, StageFunction
from nestpipe.engine.one_shot_event import OneShotEvent
from nestpipe.nn.collections import View, attach_collections, collections_in
from nestpipe.pipeline.micro_plan import Measured, Wanted, check_micro_batches
from nestpipe.pipeline.mixing import refuse_mixing
from nestpipe.pipeline.tuner import Tuner, make_plan
from nestpipe.schedule import BUILDERS, LOOKING_AHEAD, Action, Options
from nestpipe.schedule.boundary import boundary_begins
from nestpipe.schedule.timeline import Timeline
from nestpipe.sparse.batch_context import BatchContext, StepOutcome
from nestpipe.sparse.warmup import compile_kernels
from nestpipe.tables.disk.tiered_store import DiskTier
from nestpipe.tables.keyed import KeyedRows
from nestpipe.tables.optimizers import RowWiseAdagrad, SparseOptimizer

Rate = Callable[[int], float]
REQUESTS = ("checkpoint", "stop")
"""What a worker may ask all others to do after the step: each learns of it with the outcome, so all do it after the same one."""


class NotFinite(ArithmeticError):
    """A loss or gradient was NaN or infinite; nothing of that batch was applied."""

    on_all_workers = True
    """All raise it for the same batch."""


@dataclass(frozen=True)
class Progress:
    """One step that was taken."""

    batch: int
    loss: float
    """Mean over the global batch, the same on every worker."""
    samples: int
    """Of the global batch."""
    grad_norm: float
    micros: list[Batch]
    """This worker's micro-batches."""
    outputs: list[Any]
    """What the model returned for each of them beside its loss; None where a micro-batch was empty here."""
    requests: frozenset[str] = frozenset()
    """What workers requested for (`request`) before it was agreed on, the same on every worker."""


def _check_settings(schedule: str, look_ahead: int, clip_norm: float | None) -> None:
    if schedule not in BUILDERS:
        raise ValueError(f"pipeline.schedule must be one of {', '.join(BUILDERS)}, not {schedule!r}")
    if not isinstance(look_ahead, numbers.Integral) or look_ahead < 0:
        raise ValueError(f"pipeline.look_ahead must be a whole number of at least 0, not {look_ahead!r}")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm must be above 0, not {clip_norm}")


def _check_optimizers(dense: torch.optim.Optimizer | None, sparse: SparseOptimizer | None) -> None:
    if not (dense is None or isinstance(dense, torch.optim.Optimizer)):
        raise TypeError(f"dense_optimizer must be a torch.optim optimizer, not {type(dense).__module__}'s")
    if not (sparse is None or hasattr(sparse, "state_width")):
        raise TypeError("sparse_optimizer must be one of nestpipe's: SGD, RowWiseAdagrad, Adagrad, Adam")


def host_computes(model: nn.Module) -> bool:
    """Whether the host's own cores compute the dense part.  A stand-in for an accelerator says `off_host`."""
    on_host = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return on_host and not getattr(model, "off_host", False)


class TrainPipeline:
    """Trains `model` exactly synchronously on all workers of the launch.

    `model(batch)` returns the mean loss over the batch's samples (over `batch.loss_terms`, where given) and anything else.
    The pipeline owns `.grad`, the dense optimizer's steps and the tables; the model may be any nn.Module.
    """

    def __init__(
        self,
        model: nn.Module,
        dense_optimizer: torch.optim.Optimizer | None = None,
        sparse_optimizer: SparseOptimizer | None = None,
        *,
        schedule: str = "serial",
        micro_batches: Wanted = 1,
        clustering: bool | None = None,
        seed: int = 0,
        early_reduce: bool = True,
        early_update: bool = True,
        defer_weight_grads: bool = True,
        look_ahead: int = 2,
        early_prepare: bool | None = None,
        early_retrieve: bool | None = None,
        clip_norm: float | None = None,
        table_rate: Rate = lambda step: 1.0,
        dense_rate: Rate | None = None,
        tier: DiskTier | None = None,
        buffer_limit: int | None = None,
        window_limit: int | None = None,
        check_staleness: bool = False,
        trace: bool = False,
        world: World | None = None,
    ) -> None:
        _check_settings(schedule, look_ahead, clip_norm)
        _check_optimizers(dense_optimizer, sparse_optimizer)
        check_micro_batches(micro_batches)
        self.plan = make_plan(micro_batches)
        refuse_mixing(model, micro_batches)
        self.model = model
        self.optimizer = dense_optimizer
        self.world = world or World.join()
        self.schedule = schedule
        self.clustering = window_limit is not None if clustering is None else clustering
        self.clip_norm = clip_norm
        self.table_rate = table_rate
        self.dense_rate = dense_rate
        self._collections = collections_in(model)
        early_retrieve = self._retrieves_early(early_retrieve, tier)
        self._looked_up = list(dict.fromkeys(feature for c in self._collections for _, feature, _ in c.lookups))
        self.sparse = attach_collections(
            self._collections,
            self.world,
            sparse_optimizer or RowWiseAdagrad(),
            seed,
            tier=tier,
            buffer_limit=buffer_limit,
            window_limit=window_limit,
            successor_reads=schedule in LOOKING_AHEAD,
            early_retrieve=early_retrieve and schedule in LOOKING_AHEAD,
            stamped=check_staleness,
        )
        self.sparse.before_lookup = self.settle
        compile_kernels(self.sparse.groups, tier)
        if self.clustering:
            compile_clustering()
        self._dense_exchange = Exchange(self.world, "dense", self.sparse.traffic)
        late = DeferredWeightGrads(model) if defer_weight_grads else None
        self._late = late if late is not None and late.layers else None
        late_parameters = self._late.parameters if self._late is not None else []
        self.dense = DenseReplica(model.named_parameters(), self._dense_exchange, late_parameters)
        if dense_optimizer is not None:
            self.dense.check_owned(dense_optimizer)
        self.options = Options(
            max(1, len(self.dense.buckets)),
            clip_norm is not None,
            look_ahead,
            early_reduce,
            early_update,
            self._late is not None,
            host_computes(model) if early_prepare is None else early_prepare,
            early_retrieve,
            any(life is not None and life.life.sweeps for life in self.sparse.lives),
        )
        watches = early_reduce and schedule != "serial" and self._late is None
        self._watch = BackwardWatch(self.dense.buckets) if watches else None
        self._base_rates = [group["lr"] for group in dense_optimizer.param_groups] if dense_optimizer else []
        self._start_alike()
        self._source: Iterator[Batch] | None = None
        self._exhausted = False
        self._closed = False
        self._evaluating = False
        self._contexts: dict[int, BatchContext] = {}
        self._last_end: float | None = None
        self._last_step: tuple[int, Measured] | None = None
        self._busy_before = (0.0, 0.0)
        self._requested: set[str] = set()
        self.next_batch = 0
        self._start = 0
        timeline = Timeline(keep=trace)
        self.engine = Engine(
            self._stages(),
            self.world.rank,
            threads=schedule != "serial",
            timeline=timeline,
            yielding=("storage", "writeback") if tier is not None else (),
        )

    def _retrieves_early(self, wanted: bool | None, tier: DiskTier | None) -> bool:
        """Where a disk makes writeback long; not where a sweep has to see what writeback has written."""
        sweeps = any(table.life is not None and table.life.sweeps for c in self._collections for table in c.tables)
        if wanted and sweeps:
            raise ValueError(
                "pipeline.early_retrieve must be false, or left out, where tables evict rows (ttl, max_rows)"
            )
        return tier is not None and not sweeps if wanted is None else wanted

    def _stages(self) -> dict[str, StageFunction]:
        """What each stage of a schedule does, by name."""
        return {
            "load": self._load,
            "move": lambda context, micro: None,
            "route": self._route,
            "retrieve": lambda context, micro: self.sparse.retrieve(context),
            "sync": lambda context, micro: self.sparse.sync(context),
            "embed": self.sparse.embed,
            "compute": self._compute,
            "grad": self.sparse.grad,
            "accumulate": self.sparse.accumulate,
            "weight_grad": self._weights,
            "reduce": lambda context, bucket: self.dense.reduce(bucket),
            "agree": self._agree,
            "step": self._step,
            "update": lambda context, micro: self.sparse.update(context, self.table_rate),
            "writeback": lambda context, micro: self.sparse.writeback(context),
        }

    def progress(self, batches: Iterator[Batch]) -> Progress | None:
        """Takes one step; None once the data of every worker has ended.  Workers with less data join with nothing.

        A schedule that looks ahead reads later batches from `batches` meanwhile, on another thread; so go on with the same
        iterator until None comes, then another may follow.  After an error only `serial` can go on.
        """
        if not hasattr(batches, "__next__"):
            raise TypeError(
                f"progress takes an iterator of batches, not {type(batches).__name__}: pass iter(...) of it"
            )
        if self._closed:
            raise RuntimeError("this pipeline was closed: make a new TrainPipeline to train on")
        if self._evaluating:
            raise RuntimeError("progress was called in the middle of evaluate: go through all of it first, or close it")
        self.engine.raise_failure()
        if self._source is not None and batches is not self._source and self.schedule in LOOKING_AHEAD:
            raise ValueError(
                f"progress got another iterator while {self.schedule!r} has read ahead from the last one: go on with that one "
                "until progress returns None, or join them with itertools.chain"
            )
        self._source = batches
        begin = self._last_end or time.perf_counter()
        number = self.next_batch
        actions = BUILDERS[self.schedule](number, self._micro_batches(number), self._start, self.options)
        self._prepare_contexts(actions)
        try:
            self.engine.run(actions, self._contexts)
        except BaseException:
            # Whoever goes on after an error (NotFinite: skip that batch) must not meet what is left of it.
            context = self._contexts.pop(number)
            if self.schedule == "serial":  # elsewhere nobody goes on, and lanes may still be copying from its buffers
                self.sparse.drop(context)
            if self._late is not None:
                self._late.clear()
            self.engine.recover(number)
            self._exhausted = False
            self._last_end = None
            raise
        context = self._contexts[number]
        if context.ended:
            # Another iterator may follow, for another epoch: begin with an empty pipeline.
            self.settle()
            self.engine.start_over()
            for left in self._contexts.values():
                self.sparse.drop(left)
            self._contexts.clear()
            self._start = number
            self._source, self._exhausted = None, False
            return None
        self.next_batch += 1
        context.windows = []  # its rows have arrived and its gradients left
        self._contexts.pop(number - 1, None)
        self._last_end = time.perf_counter()
        self._measure(number, self._last_end - begin)
        mine = actions if self.schedule == "serial" else [a for a in actions if a.lane == CALLERS_LANE]
        self.engine.timeline.close_step(mine[-1].name, begin, self._last_end)
        self.engine.forget(number - 1)
        assert context.outcome is not None and context.routes is not None
        return Progress(
            number,
            context.outcome.loss,
            context.routes.samples,
            context.outcome.grad_norm,
            context.micros,
            context.outputs,
            context.outcome.requests,
        )

    def request(self, what: str) -> None:
        """Asks all workers for a "checkpoint" or to "stop": it is in `Progress.requests` of the same step on all.  Any thread."""
        assert what in REQUESTS, what
        self._requested.add(what)

    def resume_at(self, batch: int) -> None:
        """The next batch has this number: what was restored has seen those before it.  Only before the first `progress`."""
        if self.next_batch or self._contexts:
            raise RuntimeError("resume_at is for a pipeline that has not trained yet")
        self.next_batch = self._start = batch

    def settle(self) -> None:
        """Waits until the last step is in the tables.  Batches that are already being prepared stay prepared."""
        self.engine.settle()
        self._last_end = None

    def close(self) -> None:
        """Ends the lanes and removes a disk tier's files.  Batches that were prepared but not trained are dropped."""
        self._closed = True
        try:
            self.engine.close()
        finally:
            self.sparse.close()

    def evaluate(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, Any]]:
        """This worker's batches with what the model returns for them (beside the loss), nothing trained.

        Workers must all call it and go through to the end; one with less data joins with nothing.
        """
        self.settle()
        training = self.model.training
        self._evaluating = True
        self.model.eval()
        try:
            while True:
                batch = next(batches, None)
                context = self.sparse.look_up(batch)
                if context.ended:
                    return
                if batch is not None and len(batch):
                    with torch.no_grad(), self._looking(View(context, 0, trains=False)):
                        _, outputs = self.model(batch)
                    yield batch, outputs
        finally:
            self._evaluating = False
            self.model.train(training)

    def rows(self, table: str, keys: np.ndarray) -> Tensor:
        """Current rows [n, D] of any keys of a table, which are not created.  All workers call it together."""
        self.settle()
        return self.sparse.rows_of(table, keys)

    def evicted(self) -> dict[str, int]:
        """How many keys each table has lost on this worker so far; `take_evicted` of `sparse` lists them."""
        self.settle()
        return self.sparse.evicted()

    @property
    def stores(self) -> Sequence[KeyedRows]:
        """This worker's row store of each table group."""
        return self.sparse.stores

    def eviction_state(self) -> dict[str, Any]:
        """What a checkpoint saves of eviction beside rows, on this worker, as of `next_batch`; {} without eviction."""
        return self.sparse.life_state(self.next_batch)

    def restore_eviction(self, state: dict[str, Any]) -> None:
        """Takes all workers' merged `eviction_state`, after the rows are restored.  ValueError if it does not fit."""
        self.sparse.restore_life(state)

    def _prepare_contexts(self, actions: list[Action]) -> None:
        for action in actions:
            if action.batch not in self._contexts:
                before = self._contexts.get(action.batch - 1) if self.schedule in LOOKING_AHEAD else None
                count = self._micro_batches(action.batch)
                context = self._contexts[action.batch] = BatchContext(
                    action.batch, micro_batches=count, previous=before
                )
                if before is not None and self.options.early_retrieve:
                    context.two_before = self._contexts.get(action.batch - 2)
                if self.options.early_reduce and self.schedule != "serial":
                    made = boundary_begins(action.batch, count, self.options)
                    context.parts[made] = [OneShotEvent() for _ in range(self.options.buckets)]

    def _micro_batches(self, batch: int) -> int:
        """Settled when a batch's context is made, which is at the same step on every worker."""
        return self._contexts[batch].micro_batches if batch in self._contexts else self.plan.of(batch)

    def _measure(self, batch: int, seconds: float) -> None:
        """What the step took here; all workers tell one another with the next outcome, where somebody wants to know."""
        if isinstance(self.plan, Tuner):
            busy = self.engine.timeline.busy
            now = (busy["compute"] + busy["weight_grad"], busy["embed"] + busy["grad"])
            compute, wire = (max(0.0, after - before) for after, before in zip(now, self._busy_before))
            self._busy_before = now
            self._last_step = (batch, Measured(seconds, compute, wire))

    def _start_alike(self) -> None:
        """Every worker starts from worker 0's dense parameters and buffers."""
        if self.world.size > 1:
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                dist.broadcast(tensor.data, 0, group=self.world.groups["dense"])

    def _looking(self, view: View) -> _Looking:
        return _Looking(self, view)

    def _load(self, context: BatchContext, micro: int) -> None:
        assert self._source is not None
        try:
            batch = None if self._exhausted else next(self._source, None)
            if batch is not None and not isinstance(batch, Batch):
                raise TypeError(f"the iterator must give nestpipe.Batch, not {type(batch).__name__}")
            if batch is not None:
                count = context.micro_batches
                context.micros = cluster(batch, count, self._looked_up) if self.clustering else batch.split(count)
        except Exception as error:
            context.refuse(error, self.world.rank, "load")
        context.has_data = bool(context.micros)
        self._exhausted |= not context.has_data  # not asked again: some iterators begin anew

    def _route(self, context: BatchContext, micro: int) -> None:
        try:
            self.sparse.plan(context)
        except Exception as error:
            context.refuse(error, self.world.rank, "route")
            self.sparse.plan(context)
        self.sparse.route(context)

    def _compute(self, context: BatchContext, micro: int) -> None:
        """The model, forward and backward, on one micro-batch; skipped where this worker's is empty."""
        if context.refused is not None:
            raise context.refused
        if micro == 0:
            self.dense.clear()
            if self._late is not None:
                self._late.clear()
        batch = context.micros[micro] if context.has_data else None
        if batch is None or len(batch) == 0:
            context.outputs.append(None)
        else:
            self._forward_backward(context, micro, batch)
        if micro == context.micro_batches - 1 and self._late is None:
            self._backward_finished()

    def _weights(self, context: BatchContext, micro: int) -> None:
        """What the backward passes of all micro-batches have left to do: gradients of weights, bucket by bucket."""
        assert self._late is not None
        self._backward_finished()
        events = context.parts.get(("weight_grad", context.number, -1), ())
        self._late.make(self.dense.buckets, lambda bucket: events[bucket].set() if events else None)

    def _backward_finished(self) -> None:
        """Nothing lasting has been changed yet: the last moment to find that the dense side is not what it was."""
        self.dense.finished()
        if self.optimizer is not None:
            self.dense.check_owned(self.optimizer)

    def _forward_backward(self, context: BatchContext, micro: int, batch: Batch) -> None:
        assert context.routes is not None
        putting_off = self._late.keep() if self._late is not None else contextlib.nullcontext()
        with self._looking(View(context, micro, trains=True)), putting_off:
            result = self.model(batch)
            pair = isinstance(result, tuple) and len(result) == 2
            if not (pair and isinstance(result[0], Tensor) and result[0].numel() == 1):
                raise TypeError("the model's forward must return (loss, outputs) with a loss of one number")
            loss, outputs = result
            share = batch.terms() / context.routes.terms if context.routes.terms else 0.0
            # A micro-batch without loss terms has no mean: neither its NaN nor that of its gradients must count.
            if share and loss.requires_grad:
                scaled = loss * share
                if self._late is not None:
                    scaled.register_hook(self._late.begin)
                with self._watching(context, micro):
                    scaled.backward()
        if share:
            context.loss_sum += float(loss.detach()) * share
        context.outputs.append(outputs)

    def _watching(self, context: BatchContext, micro: int) -> contextlib.AbstractContextManager[None]:
        """In the last micro-batch: tells of each bucket of gradients as soon as it is final."""
        parts = context.parts.get(("compute", context.number, micro))
        return self._watch.watching(parts) if self._watch is not None and parts else contextlib.nullcontext()

    def _agree(self, context: BatchContext, micro: int) -> None:
        """All workers learn the loss and the gradient norm, and stop together before anything lasting is changed."""
        last, self._last_step = self._last_step, None
        took = (last[1].step, last[1].compute, last[1].wire) if last is not None else (0.0, 0.0, 0.0)
        requested = [float(what in self._requested) for what in REQUESTS]
        sums = torch.tensor([context.loss_sum, context.row_squares, *took, *requested], dtype=torch.float64)
        self._dense_exchange.all_reduce(sums)
        if last is not None:
            self.plan.learn(last[0], Measured(*(sums[2:5] / self.world.size).tolist()))
        requests = frozenset(what for what, votes in zip(REQUESTS, sums[5:].tolist()) if votes)
        self._requested -= {what for what, mine in zip(REQUESTS, requested) if mine}
        norm = math.sqrt(float(sums[1]) + self.dense.sum_of_squares()) if torch.isfinite(sums[1]) else math.nan
        context.outcome = StepOutcome(
            float(sums[0]), math.isfinite(float(sums[0])) and math.isfinite(norm), norm, requests
        )
        if not context.outcome.finite:
            self._refuse(context)
        if self.clip_norm is not None and norm > self.clip_norm:
            factor = self.clip_norm / (norm + 1e-6)
            self.dense.scale(factor)
            self.sparse.scale(context, factor)

    def _refuse(self, context: BatchContext) -> None:
        """Names the worker whose own loss or row gradients went wrong; the sums at an owner hold everybody's."""
        assert context.outcome is not None
        if math.isfinite(context.outcome.loss):
            mine_finite = all(window.finite() for window in context.windows)
        else:
            mine_finite = math.isfinite(context.loss_sum)
        culprit = torch.tensor([self.world.size if mine_finite else self.world.rank])
        self._dense_exchange.all_reduce(culprit, dist.ReduceOp.MIN)
        what = "gradient" if math.isfinite(context.outcome.loss) else "loss"
        where = f" on rank {int(culprit)}" if int(culprit) < self.world.size else ""
        raise NotFinite(
            f"batch {context.number}: the {what} is not finite{where}; nothing of this batch was applied. "
            "Lower the learning rate, set train.clip_norm, or look at that batch's data"
        )

    def _step(self, context: BatchContext, micro: int) -> None:
        if self.optimizer is None:
            return
        if self.dense_rate is not None:
            for group, base in zip(self.optimizer.param_groups, self._base_rates):
                group["lr"] = base * self.dense_rate(context.number)
        self.optimizer.step()


class _Looking:
    """While entered, the model's collections look at one micro-batch."""

    def __init__(self, pipeline: TrainPipeline, view: View) -> None:
        self._collections, self._view = pipeline._collections, view

    def __enter__(self) -> None:
        for collection in self._collections:
            collection.look_at(self._view)

    def __exit__(self, *_: object) -> None:
        for collection in self._collections:
            collection.look_at(None)
