"""What each stage does to one batch: a method per stage, named as in `schedule.stages`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestpipe.comm.exchange import Exchange
from nestpipe.data.batch import Batch
from nestpipe.dense.backward_watch import BackwardWatch
from nestpipe.dense.replica import DenseReplica
from nestpipe.dense.weight_grads import DeferredWeightGrads
from nestpipe.device.backend import Device
from nestpipe.nn.collections import Collection
from nestpipe.nn.row_view import RowView
from nestpipe.pipeline.feed import BatchFeed
from nestpipe.pipeline.micro_plan import Measured, MicroPlan
from nestpipe.pipeline.moving import move_batches
from nestpipe.pipeline.progress import REQUESTS, NotFinite
from nestpipe.schedule.stages import STAGES
from nestpipe.sparse.batch_context import BatchContext, StepOutcome
from nestpipe.sparse.stages import SparseStages
from nestpipe.sparse.view import MicroBatchView
from nestpipe.tables.config import TableConfig

Rate = Callable[[int], float]
StageFunction = Callable[[BatchContext, int], None]


class PipelineStages:
    """Composes the sparse and the dense side.  The second argument of a stage is its micro-batch or bucket, -1 for neither."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        collections: Sequence[Collection[TableConfig]],
        feed: BatchFeed,
        sparse: SparseStages,
        dense: DenseReplica,
        deferred: DeferredWeightGrads | None,
        watch: BackwardWatch | None,
        plan: MicroPlan,
        device: Device,
        agree_exchange: Exchange,
        *,
        clip_norm: float | None,
        table_rate: Rate,
        dense_rate: Rate | None,
        precision: str,
    ) -> None:
        self.model, self.optimizer, self.plan = model, optimizer, plan
        self.sparse, self.dense = sparse, dense
        self.deferred, self.watch = deferred, watch
        self.last_step: tuple[int, Measured] | None = None
        """The last step and what it took here.  The next `agree` shares it with all workers."""
        self.requested: set[str] = set()
        self._world, self._exchange, self._device = sparse.world, agree_exchange, device
        self._collections, self._feed = collections, feed
        self._bf16 = precision == "bf16"
        self._clip_norm, self._table_rate, self._dense_rate = clip_norm, table_rate, dense_rate
        self._base_rates = [group["lr"] for group in optimizer.param_groups] if optimizer else []

    def functions(self) -> dict[str, StageFunction]:
        """The method of every stage, by name."""
        return {name: getattr(self, name) for name in STAGES}

    def use_exchange(self, exchange: Exchange) -> None:
        """Another way to talk about dense gradients: to measure a step that sends nothing."""
        self._exchange = exchange
        self.dense.exchange = exchange

    def load(self, context: BatchContext, _: int) -> None:
        try:
            context.micros = self._feed.take(context.micro_batches)
        except Exception as error:
            context.refuse(error, self._world.rank, "load")
            self._feed.stop()
        context.has_data = bool(context.micros)

    def move(self, context: BatchContext, _: int) -> None:
        """The micro-batches to where the model is, in one copy; nothing to do on a host."""
        context.moved = move_batches(context.micros, self._device)

    def route(self, context: BatchContext, _: int) -> None:
        try:
            self.sparse.plan(context)
        except Exception as error:
            context.refuse(error, self._world.rank, "route")
            self.sparse.plan(context)
        self.sparse.route(context)

    def retrieve(self, context: BatchContext, _: int) -> None:
        self.sparse.retrieve(context)

    def peek(self, context: BatchContext, _: int) -> None:
        self.sparse.peek(context)

    def sync(self, context: BatchContext, _: int) -> None:
        self.sparse.sync(context)

    def embed(self, context: BatchContext, micro: int) -> None:
        self.sparse.embed(context, micro)

    def compute(self, context: BatchContext, micro: int) -> None:
        """The model, forward and backward, on one micro-batch; skipped where this worker's is empty."""
        if context.refused is not None:
            raise context.refused
        if micro == 0:
            self.dense.clear()
            if self.deferred is not None:
                self.deferred.clear()
        batch = context.micros[micro] if context.has_data else None
        if batch is None or len(batch) == 0:
            context.outputs.append(None)
        else:
            begin = self._device.compute_clock()
            self._forward_backward(context, micro, batch)
            context.compute_seconds += self._device.compute_clock() - begin
        if micro == context.micro_batches - 1 and self.deferred is None:
            self._check_dense_side()

    def grad(self, context: BatchContext, micro: int) -> None:
        self.sparse.grad(context, micro)

    def accumulate(self, context: BatchContext, micro: int) -> None:
        self.sparse.accumulate(context, micro)

    def replicate(self, context: BatchContext, micro: int) -> None:
        self.sparse.replicate(context, micro)

    def weight_grad(self, context: BatchContext, _: int) -> None:
        """The weight gradients that the backward passes of all micro-batches have deferred, bucket by bucket."""
        assert self.deferred is not None
        self._check_dense_side()
        events = context.parts.get(("weight_grad", context.number, -1), ())
        begin = self._device.compute_clock()
        self.deferred.make(self.dense.buckets, lambda bucket: events[bucket].set() if events else None)
        context.compute_seconds += self._device.compute_clock() - begin

    def reduce(self, context: BatchContext, bucket: int) -> None:
        self.dense.reduce(bucket)

    def agree(self, context: BatchContext, _: int) -> None:
        """All workers learn the loss and the gradient norm, and stop together before anything lasting changes."""
        last, self.last_step = self.last_step, None
        took = (last[1].step, last[1].compute, last[1].wire) if last is not None else (0.0, 0.0, 0.0)
        requested = [float(what in self.requested) for what in REQUESTS]
        row_squares, dense_squares = self._read(context)
        sums = torch.tensor([context.loss_sum, row_squares, *took, *requested], dtype=torch.float64)
        self._exchange.all_reduce(sums)
        if last is not None:
            self.plan.learn(last[0], Measured(*(sums[2:5] / self._world.size).tolist()))
        requests = frozenset(what for what, votes in zip(REQUESTS, sums[5:].tolist()) if votes)
        self.requested -= {what for what, mine in zip(REQUESTS, requested) if mine}
        loss = float(sums[0])
        norm = math.sqrt(float(sums[1]) + dense_squares) if torch.isfinite(sums[1]) else math.nan
        context.outcome = StepOutcome(loss, math.isfinite(loss) and math.isfinite(norm), norm, requests)
        if not context.outcome.finite:
            self._refuse(context)
        if self._clip_norm is not None and norm > self._clip_norm:
            factor = self._clip_norm / (norm + 1e-6)
            self.dense.scale(factor)
            self.sparse.scale(context, factor)

    def _read(self, context: BatchContext) -> tuple[float, float]:
        """Sums of squares of row gradients and of dense gradients, and `loss_sum`: the host waits once for all of them."""
        losses, dense = [loss for loss, _ in context.losses], self.dense.sums_of_squares()
        found = self._device.read([*losses, *context.row_squares, *dense])
        context.loss_sum = 0.0
        for loss, (_, share) in zip(found, context.losses):
            context.loss_sum += loss * share
        squares = found[len(losses) :]
        rows = len(context.row_squares)
        return float(sum(squares[:rows])), float(sum(squares[rows:]))

    def step(self, context: BatchContext, _: int) -> None:
        if self.optimizer is None:
            return
        if self._dense_rate is not None:
            for group, base in zip(self.optimizer.param_groups, self._base_rates):
                group["lr"] = base * self._dense_rate(context.number)
        self.optimizer.step()

    def update(self, context: BatchContext, _: int) -> None:
        self.sparse.update(context, self._table_rate)

    def writeback(self, context: BatchContext, _: int) -> None:
        self.sparse.writeback(context)

    def average(self, context: BatchContext, _: int) -> None:
        self.sparse.average()

    @contextlib.contextmanager
    def looking_at(self, view: RowView):  # type: ignore[no-untyped-def]
        """Inside, the model's collections read this view."""
        for collection in self._collections:
            collection.look_at(view)
        try:
            yield
        finally:
            for collection in self._collections:
                collection.look_at(None)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Around the model's forward pass: bfloat16, where that is asked for."""
        if not self._bf16:
            return contextlib.nullcontext()
        return torch.autocast(self._device.torch_device.type, dtype=torch.bfloat16)

    def _forward_backward(self, context: BatchContext, micro: int, batch: Batch) -> None:
        assert context.routes is not None
        deferring = self.deferred.keep() if self.deferred is not None else contextlib.nullcontext()
        with self.looking_at(MicroBatchView(context, micro, True, self._device)), deferring:
            with self.autocast():
                result = self.model(context.moved[micro])
            pair = isinstance(result, tuple) and len(result) == 2
            if not (pair and isinstance(result[0], Tensor) and result[0].numel() == 1):
                raise TypeError("the model's forward must return (loss, outputs) with a loss of one number")
            loss, outputs = result
            share = batch.terms() / context.routes.terms if context.routes.terms else 0.0
            # A micro-batch without loss terms has no mean: neither its NaN nor that of its gradients must count.
            if share and loss.requires_grad:
                scaled = loss * share
                if self.deferred is not None:
                    scaled.register_hook(self.deferred.begin)
                with self._watching(context, micro):
                    scaled.backward()
        if share:
            context.losses.append((loss.detach(), share))
        context.outputs.append(outputs)

    def _watching(self, context: BatchContext, micro: int) -> contextlib.AbstractContextManager[None]:
        """In the last micro-batch: signals each bucket of gradients as soon as it is final."""
        parts = context.parts.get(("compute", context.number, micro))
        return self.watch.watching(parts) if self.watch is not None and parts else contextlib.nullcontext()

    def _check_dense_side(self) -> None:
        """Nothing lasting has changed yet: the last moment to find that the model or its optimizer was replaced."""
        self.dense.finished()
        if self.optimizer is not None:
            self.dense.check_owned(self.optimizer)

    def _refuse(self, context: BatchContext) -> None:
        """Names the worker whose own loss or row gradients went wrong; the sums at an owner hold those of all workers."""
        assert context.outcome is not None
        if math.isfinite(context.outcome.loss):
            mine_finite = all(window.finite() for window in context.windows)
        else:
            mine_finite = math.isfinite(context.loss_sum)
        culprit = torch.tensor([self._world.size if mine_finite else self._world.rank])
        self._exchange.all_reduce(culprit, dist.ReduceOp.MIN)
        what = "gradient" if math.isfinite(context.outcome.loss) else "loss"
        where = f" on rank {int(culprit)}" if int(culprit) < self._world.size else ""
        raise NotFinite(
            f"batch {context.number}: the {what} is not finite{where}; nothing of this batch was applied. "
            "Lower the learning rate, set train.clip_norm, or look at that batch's data"
        )
