"""`TrainPipeline`: a model, its tables and a schedule, stepped by `progress`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from nestpipe.comm.consistency import check_consistent, sum_over_workers
from nestpipe.comm.exchange import Exchange, Traffic
from nestpipe.comm.members import Members
from nestpipe.comm.topology import Topology, group_size, split
from nestpipe.comm.wire import open_wire
from nestpipe.comm.world import World
from nestpipe.config.checks import above_zero, one_of
from nestpipe.config.pipeline import PipelineConfig
from nestpipe.config.training import PRECISIONS
from nestpipe.data.batch import Batch
from nestpipe.data.clustering import compile_clustering
from nestpipe.dense.backward_watch import BackwardWatch
from nestpipe.dense.replica import DenseReplica
from nestpipe.device.choice import device_for, device_of
from nestpipe.engine.interpreter import Engine
from nestpipe.nn.collections import Collection, collections_in
from nestpipe.pipeline.averaging import check_averaging
from nestpipe.pipeline.feed import BatchFeed
from nestpipe.pipeline.micro_plan import Measured
from nestpipe.pipeline.mixing import refuse_mixing
from nestpipe.pipeline.moving import move_batches
from nestpipe.pipeline.progress import REQUESTS, Progress
from nestpipe.pipeline.stages import PipelineStages, Rate, StageFunction
from nestpipe.pipeline.tuner import Choice, Tuner, make_plan
from nestpipe.pipeline.workload import deferred_of, workload_of
from nestpipe.schedule import BUILDERS, LOOKING_AHEAD, STALE, Action
from nestpipe.schedule.averaging import averaged_after, inexact, opens_late
from nestpipe.schedule.boundary import boundary_begins
from nestpipe.schedule.dbp import again
from nestpipe.schedule.options import resolve
from nestpipe.schedule.semi_async import refreshing
from nestpipe.schedule.stages import CALLERS_LANE
from nestpipe.schedule.timeline import Timeline
from nestpipe.sparse.attach import attach_collections
from nestpipe.sparse.batch_context import BatchContext
from nestpipe.sparse.evictor import Evicted
from nestpipe.sparse.view import MicroBatchView
from nestpipe.sparse.warmup import compile_kernels
from nestpipe.tables.disk.tiered_store import DiskTier
from nestpipe.tables.keyed import KeyedRows
from nestpipe.tables.optimizers import RowWiseAdagrad, SparseOptimizer


class TrainPipeline:
    """Trains `model` exactly synchronously on all workers of the launch, unless `replicas = "average"` says otherwise.

    `model(batch)` returns the mean loss over the batch's samples (over `batch.loss_terms`, where given) and anything else.
    The pipeline owns `.grad`, the dense optimizer's steps and the tables; the model may be any nn.Module.

    `sparse`, `dense` and `engine` are its parts; code outside this room uses the methods below.
    """

    def __init__(
        self,
        model: nn.Module,
        dense_optimizer: torch.optim.Optimizer | None = None,
        sparse_optimizer: SparseOptimizer | None = None,
        config: PipelineConfig | None = None,
        *,
        seed: int = 0,
        clip_norm: float | None = None,
        table_rate: Rate = lambda step: 1.0,
        dense_rate: Rate | None = None,
        tier: DiskTier | None = None,
        buffer_limit: int | None = None,
        window_limit: int | None = None,
        precision: str = "float32",
        check_staleness: bool = False,
        trace: bool = False,
        world: World | None = None,
        **knobs: Any,
    ) -> None:
        """`knobs` are fields of `PipelineConfig`, given one by one instead of (or on top of) `config`.

        It trains where the model's parameters are: on the host, or on the device that the model was moved to.
        `precision` "bf16" runs the model under bfloat16 autocast; rows and optimizer state stay as they are.
        """
        one_of("train.precision", precision, PRECISIONS)
        _check_arguments(dense_optimizer, sparse_optimizer, config)
        above_zero("train.clip_norm", clip_norm)
        above_zero("memory.buffer_limit", buffer_limit)
        above_zero("memory.window_limit", window_limit)
        self.config = (config or PipelineConfig()).changed(**knobs)
        refuse_mixing(model, self.config.micro_batches)
        self.model = model
        self.optimizer = dense_optimizer
        self.dense_rate = dense_rate
        """A factor on the dense learning rates for every batch; None: the caller sets the optimizer's rates."""
        self.world = world or World.join()
        self._looks_ahead = self.config.schedule in LOOKING_AHEAD
        self._stale = self.config.schedule in STALE
        collections = collections_in(model)
        sparse_optimizer = sparse_optimizer or RowWiseAdagrad()
        size, problem = _group_size(self.config, self.world)
        check_consistent(
            self.world,
            "give TrainPipeline the same on every worker, and only batches of its own to each",
            pipeline_config=self.config,
            seed=seed,
            sparse_optimizer=sparse_optimizer,
            tables=[table for collection in collections for table in collection.tables],
            group_size=size,
        )
        if problem is not None:
            raise problem
        self.topology: Topology = split(self.world, size)
        averages = self.config.replicas == "average" and self.topology.replicas.size > 1
        if averages:
            check_averaging(sparse_optimizer, [table for collection in collections for table in collection.tables])
        traffic = Traffic()
        self.device = device_for(device_of(model))
        wire = open_wire(self.world, self.device, traffic, self.topology)
        deferred = deferred_of(model, self.config)
        self.dense = DenseReplica(
            model.named_parameters(),
            wire.dense,
            deferred.parameters if deferred is not None else [],
        )
        if dense_optimizer is not None:
            self.dense.check_owned(dense_optimizer)
        workload = workload_of(
            model,
            self.dense,
            deferred,
            clips=clip_norm is not None,
            on_disk=tier is not None,
            replicates=self.topology.replicas.size > 1 and not averages,
            averages=averages,
        )
        self.options = resolve(self.config, workload)
        self.sparse = attach_collections(
            collections,
            self.world,
            sparse_optimizer,
            seed,
            topology=self.topology,
            device=self.device,
            row_exchange=wire.rows,
            replica_exchange=wire.replicas,
            tier=tier,
            buffer_limit=buffer_limit,
            window_limit=window_limit,
            buffer_readers=1 + self._looks_ahead + (self._looks_ahead and self.options.early_retrieve),
            peeks=self._stale,
            stamped=check_staleness,
            traffic=traffic,
            moment_scale=(self.config.moment_scale or 1 / self.topology.replicas.size) if averages else None,
        )
        self.sparse.before_lookup = self.settle
        compile_kernels(self.sparse.groups, tier)
        self._plan = make_plan(self.config.micro_batches)
        self._feed = self._make_feed(collections, window_limit)
        self._stages = PipelineStages(
            model,
            dense_optimizer,
            collections,
            self._feed,
            self.sparse,
            self.dense,
            deferred,
            BackwardWatch(self.dense.buckets) if self._reduces_early and deferred is None else None,
            self._plan,
            self.device,
            wire.agree,
            clip_norm=clip_norm,
            table_rate=table_rate,
            dense_rate=dense_rate,
            precision=precision,
        )
        self._start_from_rank_0()
        self._closed = False
        self._evaluating = False
        self._contexts: dict[int, BatchContext] = {}
        self._last_end: float | None = None
        self._busy_before = (0.0, 0.0)
        self._choices_told = 0
        self.next_batch = 0
        self._start = 0
        """The first batch since the pipeline was last empty."""
        self._averaged_at = 0
        """Batches that had been trained when replicas were last made equal."""
        self.engine = Engine(
            self._stages.functions(),
            self.world.rank,
            threads=self.config.schedule != "serial",
            timeline=Timeline(keep=trace),
            yielding=("storage", "writeback") if tier is not None else (),
            device=self.device,
        )
        self._wire = wire
        wire.on_lost(self.engine.fail)
        self.engine.behind = wire.behind

    def progress(self, batches: Iterator[Batch]) -> Progress | None:
        """Takes one step; None once the data of every worker has ended.  Workers with less data join with nothing.

        A schedule that looks ahead reads later batches from `batches` on another thread.  So call it with the same iterator until
        it returns None; then another may follow.  After an error only `serial` can continue.
        """
        self._check_iterator(batches)
        self._feed.start(batches)
        begin = self._last_end or time.perf_counter()
        self.device.begin_step()
        number = self.next_batch
        actions = self._actions(number)
        self._prepare_contexts(actions)
        try:
            self.engine.run(actions, self._contexts)
        except BaseException:
            self._drop_failed(number)
            raise
        context = self._contexts[number]
        if context.ended:
            self._empty(number)
            return None
        self.next_batch += 1
        if averaged_after(number, self.options):
            self._averaged_at = self.next_batch
        context.windows = []  # its rows have arrived and its gradients left
        self._contexts.pop(number - 1, None)
        self._last_end = time.perf_counter()
        self._measure(number, self._last_end - begin)
        on_caller = self.config.schedule == "serial"
        mine = actions if on_caller else [action for action in actions if action.lane == CALLERS_LANE]
        self.timeline.close_step(mine[-1].name, begin, self._last_end)
        self.engine.forget(number - 1)
        outcome, routes = context.outcome, context.routes
        assert outcome is not None and routes is not None
        return Progress(
            number,
            outcome.loss,
            routes.samples,
            outcome.grad_norm,
            context.micros,
            context.outputs,
            outcome.requests,
            context.compute_seconds,
        )

    def evaluate(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, Any]]:
        """This worker's batches with what the model returns for them (beside the loss); trains nothing.

        All workers call it and iterate to the end; one with less data joins with nothing.
        """
        with contextlib.closing(self.evaluate_with_loss(batches)) as found:
            for batch, _, outputs in found:
                yield batch, outputs

    def evaluate_with_loss(self, batches: Iterator[Batch]) -> Generator[tuple[Batch, Tensor, Any], None, None]:
        """As `evaluate`, with the model's loss between the two: the mean over the batch's samples."""
        self.unite()
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
                    context.moved = move_batches([batch], self.device)
                    view = MicroBatchView(context, 0, False, self.device)
                    with torch.no_grad(), self._stages.looking_at(view), self._stages.autocast():
                        loss, outputs = self.model(context.moved[0])
                    yield batch, loss, outputs
        finally:
            self._evaluating = False
            self.model.train(training)

    def settle(self) -> None:
        """Waits until the last step is in the tables.  Batches that are being prepared stay prepared."""
        self.engine.settle()
        self._last_end = None

    def refresh(self) -> None:
        """Lets the next batch read one copy of the tables, as the last step left it, under schedules that are inexact, too.

        A checkpoint calls it: a run that resumes there knows no older rows and no other copies.  Rows that have left already are
        sent again, so all workers call it together.  Nothing to do under exact schedules.
        """
        self.unite()
        context = self._contexts.get(self.next_batch)
        if self._stale and context is not None and context.shared and not (context.refreshed or context.ended):
            context.refreshed = True
            self.engine.run(
                refreshing(context.number, context.micro_batches, self._start, self.options), self._contexts
            )
            self.settle()

    def unite(self) -> None:
        """As `settle`; then averages replicas that train on their own, so that there is one copy of the tables.

        An evaluation calls it, so it changes what is trained next.  Rows that batches in preparation had already are fetched
        again.  All workers call it together.  The second call between two steps does nothing.
        """
        self.settle()
        if not self.options.average_every or self._averaged_at == self.next_batch:
            return
        self.sparse.average()
        self._averaged_at = self.next_batch
        context = self._contexts.get(self.next_batch)
        if self._looks_ahead and context is not None and context.buffers:
            context.previous = None
            for prepared in (context, self._contexts.get(context.number + 1)):
                if prepared is not None:
                    self.sparse.forget_rows(prepared)
            self.device.begin_step()
            self.engine.run(again(context.number, self._start, self.options), self._contexts)
            self.settle()

    @property
    def inexact(self) -> str | None:
        """In what averaged replicas differ from synchronous training, in a few words; None where they do not."""
        return inexact(self.options)

    def close(self) -> None:
        """Ends the lanes and removes a disk tier's files.  Drops batches that were prepared but not trained."""
        self._closed = True
        try:
            self.engine.close()
        finally:
            self.sparse.close()
            self._wire.close()

    def request(self, what: str) -> None:
        """Asks all workers for a "checkpoint" or to "stop": `Progress.requests` of one step says so on all.  Any thread."""
        assert what in REQUESTS, what
        self._stages.requested.add(what)

    def resume_at(self, batch: int) -> None:
        """Gives the next batch this number: what was restored has seen those before it.  Only before the first `progress`."""
        if self.next_batch or self._contexts:
            raise RuntimeError("resume_at is for a pipeline that has not trained yet")
        self.next_batch = self._start = self._averaged_at = batch

    # Tables

    @property
    def stores(self) -> Sequence[KeyedRows]:
        """This worker's row store of each table group."""
        return self.sparse.stores

    def place_of(self, table: str) -> tuple[int, int]:
        """The group of a table, and its number in that group."""
        return self.sparse.place_of(table)

    def rows(self, table: str, keys: np.ndarray) -> Tensor:
        """Current rows [n, D] of any keys of a table; creates none.  All workers call it together."""
        self.settle()
        return self.sparse.rows_of(table, keys)

    def evicted(self) -> dict[str, int]:
        """How many keys each table has evicted on this worker so far."""
        self.settle()
        return self.sparse.evicted()

    def total_evicted(self) -> dict[str, int]:
        """How many keys each table has evicted so far, over all workers, those of replicas once.  All workers call it."""
        counts = self.topology.replicas.counts
        return sum_over_workers(self.world, {t: n if counts else 0 for t, n in self.sparse.evicted().items()})

    def take_evicted(self) -> list[Evicted]:
        """The keys that were evicted on this worker since the last call."""
        return self.sparse.take_evicted()

    def ttl_horizons(self) -> list[tuple[int, int]]:
        """What `ttl_minutes` came to in the sweeps so far, as `ttl_horizons` of a recipe takes it."""
        return self.sparse.horizons()

    def eviction_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of admission and eviction on this worker, beside rows."""
        return self.sparse.eviction_state(self.next_batch)

    def restore_eviction(self, state: dict[str, Any]) -> None:
        """Takes up what `eviction_state` gave, summed over all workers.  ValueError if it is of other tables."""
        self.sparse.restore_eviction(state)

    # What it did

    @property
    def timeline(self) -> Timeline:
        """When the last actions ran, and what was hidden and exposed."""
        return self.engine.timeline

    @property
    def traffic(self) -> Traffic:
        """Bytes that this worker has sent."""
        return self.sparse.traffic

    @property
    def micro_batch_choices(self) -> list[tuple[int, int]]:
        """(first batch, micro-batches) so far; given back as `micro_batches` it makes a run with the same digest."""
        return self._plan.choices

    def new_choices(self) -> list[Choice]:
        """What "auto" has decided since the last call; empty where micro-batches are given."""
        found = self._plan.decided[self._choices_told :] if isinstance(self._plan, Tuner) else []
        self._choices_told += len(found)
        return found

    def restore_choices(self, batch: int, choices: list[tuple[int, int]]) -> None:
        """What "auto" had chosen before `batch`, from a checkpoint."""
        if isinstance(self._plan, Tuner) and choices:
            self._plan.resume(batch, choices)

    def memory(self) -> dict[str, int]:
        """Bytes that this worker holds, by what for."""
        return self.sparse.memory()

    def figures(self) -> dict[str, Any]:
        """What a run's summary tells about this worker's tables and buffers."""
        return self.sparse.figures()

    # For measurements

    def stage(self, name: str) -> StageFunction:
        """What a stage runs."""
        return self.engine.stage(name)

    def replace_stages(self, **stages: StageFunction) -> None:
        """Runs other functions for some stages: to measure a step without them, or to break it on purpose."""
        self.engine.replace(**stages)

    def replace_exchanges(self, make: Callable[[Members, str], Exchange]) -> None:
        """Rows, row gradients and dense gradients travel by other exchanges: to measure a step that sends nothing."""
        shard, replicas = self.topology.shard, self.topology.replicas
        self.sparse.use_row_exchange(make(shard, "network"), make(replicas, "replica"))
        self._stages.use_exchange(make(self.world, "dense"))

    def replace_stores(self, stores: Sequence[KeyedRows]) -> Sequence[KeyedRows]:
        """Other row stores of the same groups; returns those before, which the caller closes."""
        before, self.sparse.stores = self.sparse.stores, list(stores)
        return before

    def zero_grad(self) -> None:
        """Zeroes the dense gradients, as the first micro-batch of a batch does."""
        self.dense.clear()

    # The inside of a step

    @property
    def _reduces_early(self) -> bool:
        return self.options.early_reduce and self.config.schedule != "serial"

    def _make_feed(self, collections: Sequence[Collection[Any]], window_limit: int | None) -> BatchFeed:
        clustering = window_limit is not None if self.config.clustering is None else self.config.clustering
        if clustering:
            compile_clustering()
        features = list(dict.fromkeys(feature for c in collections for _, feature, _ in c.lookups))
        return BatchFeed(features, clustering)

    def _start_from_rank_0(self) -> None:
        """Every worker starts from worker 0's dense parameters and buffers."""
        if self.world.size > 1:
            for tensor in [*self.model.parameters(), *self.model.buffers()]:
                here = tensor.detach().cpu()  # itself, on the host
                dist.broadcast(here, 0, group=self.world.groups["dense"])
                tensor.data.copy_(here)

    def _check_iterator(self, batches: Iterator[Batch]) -> None:
        if not hasattr(batches, "__next__"):
            raise TypeError(
                f"progress takes an iterator of batches, not {type(batches).__name__}: pass iter(...) of it"
            )
        if self._closed:
            raise RuntimeError("this pipeline was closed: make a new TrainPipeline to train on")
        if self._evaluating:
            raise RuntimeError("progress was called in the middle of evaluate: go through all of it first, or close it")
        self.engine.raise_failure()
        if self._feed.source is not None and batches is not self._feed.source and self._looks_ahead:
            raise ValueError(
                f"progress got another iterator while {self.config.schedule!r} has read ahead from the last one: use that one "
                "until progress returns None, or join them with itertools.chain"
            )

    def _actions(self, number: int) -> list[Action]:
        """What this step issues."""
        count = self._micro_batches(number)
        more = {"following": self._micro_batches(number + 1)} if self._stale else {}
        return BUILDERS[self.config.schedule](number, count, self._start, self.options, **more)

    def _prepare_contexts(self, actions: list[Action]) -> None:
        for action in actions:
            if action.batch not in self._contexts:
                shares = self._looks_ahead and not opens_late(action.batch, self._start, self.options)
                before = self._contexts.get(action.batch - 1) if shares else None
                count = self._micro_batches(action.batch)
                context = self._contexts[action.batch] = BatchContext(
                    action.batch, micro_batches=count, previous=before, readers=self._readers(action.batch)
                )
                late = opens_late(action.batch - 1, self._start, self.options)
                if before is not None and self.options.early_retrieve and not late:
                    context.two_before = self._contexts.get(action.batch - 2)
                if self._reduces_early:
                    made = boundary_begins(action.batch, count, self.options)
                    context.parts[made] = [self.device.event() for _ in range(self.options.buckets)]

    def _readers(self, batch: int) -> int:
        """Who reads a batch's row buffer: its own `writeback`, and batches behind it unless replicas are averaged in between."""
        next_late, second_late = (opens_late(batch + n, self._start, self.options) for n in (1, 2))
        next_reads = self._looks_ahead and not next_late
        return 1 + next_reads + (next_reads and self.options.early_retrieve and not second_late)

    def _micro_batches(self, batch: int) -> int:
        """Decided when the batch's context is made, which is at the same step on every worker."""
        return self._contexts[batch].micro_batches if batch in self._contexts else self._plan.of(batch)

    def _drop_failed(self, number: int) -> None:
        """A caller that continues after an error (NotFinite: skip that batch) must not meet what is left of it."""
        context = self._contexts.pop(number)
        if self.config.schedule == "serial":  # elsewhere nobody continues, and lanes may still copy from its buffers
            self.sparse.drop(context)
        if self._stages.deferred is not None:
            self._stages.deferred.clear()
        self.engine.recover(number)
        self._feed.retry()
        self._last_end = None

    def _empty(self, number: int) -> None:
        """The data has ended.  Another iterator may follow, for another epoch, and finds an empty pipeline."""
        self.settle()
        self.engine.start_over()
        for left in self._contexts.values():
            self.sparse.drop(left)
        self._contexts.clear()
        self._start = number
        self._feed.end()

    def _measure(self, batch: int, seconds: float) -> None:
        """What the step took here; where "auto" wants to know, workers share it in the next `agree`."""
        if isinstance(self._plan, Tuner):
            busy = self.timeline.busy
            now = (busy["compute"] + busy["weight_grad"], busy["embed"] + busy["grad"] + busy["replicate"])
            compute, wire = (max(0.0, after - before) for after, before in zip(now, self._busy_before))
            self._busy_before = now
            self._stages.last_step = (batch, Measured(seconds, compute, wire))


def _group_size(config: PipelineConfig, world: World) -> tuple[int, ValueError | None]:
    """The size of a shard group, or why there is none: told after all workers have compared what they found."""
    try:
        return group_size(config.group_size, world.size), None
    except ValueError as error:
        return 0, error


def _check_arguments(dense: object, sparse: object, config: object) -> None:
    if not (config is None or isinstance(config, PipelineConfig)):
        raise TypeError(f"config must be a nestpipe.PipelineConfig, not {type(config).__name__}")
    if not (dense is None or isinstance(dense, torch.optim.Optimizer)):
        raise TypeError(f"dense_optimizer must be a torch.optim optimizer, not {type(dense).__module__}'s")
    missing = [name for name in ("lr", "state_width", "apply") if not hasattr(sparse, name)]
    if sparse is not None and missing:
        raise TypeError(
            f"sparse_optimizer must be SGD, RowWiseAdagrad, Adagrad or Adam of nestpipe, or have lr, state_width and apply as "
            f"these do; {type(sparse).__name__} has no {missing[0]}"
        )
