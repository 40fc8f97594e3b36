"""Admission and eviction against an oracle in plain Python, and bit for bit the same under every schedule."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from nestpipe import (
    SGD,
    Adam,
    Batch,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EvictionPolicy,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    TrainPipeline,
    World,
)
from nestpipe.keys import owners_of
from nestpipe.pipeline import NotFinite
from nestpipe.schedule import EXACT
from nestpipe.sparse.evictor import Evictor
from nestpipe.sparse.one_batch_old import OneBatchOld
from nestpipe.tables.disk.tiered_store import DiskTier
from nestpipe.tables.eviction import kernels as eviction_kernels
from nestpipe.tables.eviction.horizon import MOST, AgreedClock
from workers import run

Steps = list[list[list[int]]]
"""Per step, per worker: the keys of its samples, one each."""

OPTIMIZERS = {"sgd": SGD(0.1), "rowwise": RowWiseAdagrad(0.1), "adam": Adam(0.1)}


class Model(nn.Module):
    """Two tables with one policy, and a third of another dimension that admits keys one batch later."""

    def __init__(self, policy: EvictionPolicy, dtype: str = "float32") -> None:
        super().__init__()
        later = replace(policy, admit_after=policy.admit_after + 1)
        tables = [("a", 3, policy), ("b", 3, policy), ("c", 5, later)]
        self.sparse = EmbeddingBagCollection(
            [EmbeddingBagConfig(name, d, ["f"], dtype, init_scale=1.0, eviction=p) for name, d, p in tables]
        )
        torch.manual_seed(3)
        self.dense = nn.Linear(11, 1).to(getattr(torch, dtype))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, None]:
        return self.dense(self.sparse(batch.sparse_features).values()).square().mean(), None


def batches(steps: Steps, rank: int) -> Iterator[Batch]:
    for step in steps:
        ids = torch.tensor(step[rank], dtype=torch.int64)
        yield Batch(KeyedJaggedTensor(["f"], ids, lengths=torch.ones(len(ids), dtype=torch.int64), stride=len(ids)))


@dataclass(frozen=True)
class Setting:
    policy: EvictionPolicy
    optimizer: str = "adam"
    micro_batches: int = 1
    disk: bool = False
    dtype: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)


def make(world: World, setting: Setting, schedule: str, folder: str) -> TrainPipeline:
    model = Model(setting.policy, setting.dtype)
    return TrainPipeline(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        OPTIMIZERS[setting.optimizer],
        schedule=schedule,
        micro_batches=setting.micro_batches,
        tier=DiskTier(folder, 2) if setting.disk else None,
        world=world,
        **setting.options,
    )


def left_behind(pipeline: TrainPipeline) -> dict[str, Any]:
    """All rows with their state and usage, all frequencies, and all evictions of this worker."""
    left: dict[str, Any] = {"evicted": pipeline.evicted()}
    for group, store in zip(pipeline.sparse.groups, pipeline.sparse.stores):
        for number, table in enumerate(group.tables):
            keys, slots = store.rows_of(number)
            values, state = store.read(slots)
            usage = group.eviction_columns(state)
            if len(keys):
                assert np.array_equal(usage, store.usage[slots]), "a sweep must see the usage of the row"
            state = state[:, : group.optimizer_width]
            left[table.name] = (keys.tobytes(), values.tobytes(), state.tobytes(), usage.tobytes())
            if store.frequencies is not None:
                keys, slots = store.frequencies.rows_of(number)
                left[f"waiting {table.name}"] = (keys.tobytes(), store.frequencies.read(slots)[0].tobytes())
    listed = pipeline.sparse.take_evicted()
    left["listed"] = sorted((e.batch, e.table, e.keys.tolist()) for e in listed)
    for name, parameter in pipeline.model.named_parameters():
        left[name] = parameter.detach().numpy().tobytes()
    return left


def trained(
    world: World,
    steps: Steps,
    setting: Setting,
    schedule: str,
    most: int | None = None,
    poison: Callable[[TrainPipeline], None] | None = None,
) -> dict[str, Any]:
    """What `most` steps leave (None: all).  The iterator has all batches, so that a schedule may look ahead."""
    with tempfile.TemporaryDirectory() as folder:
        pipeline = make(world, setting, schedule, folder)
        if poison is not None:
            poison(pipeline)
        data = batches(steps, world.rank)
        losses = []
        while len(losses) != most and (step := pipeline.progress(data)):
            losses.append(step.loss)
        left = left_behind(pipeline)
        pipeline.close()
    return {**left, "losses": losses}


def both(world: World, steps: Steps, setting: Setting, schedule: str, most: int | None) -> bool:
    serial = trained(world, steps, setting, "serial", most)
    return serial == trained(world, steps, setting, schedule, most)


policies = st.builds(
    EvictionPolicy,
    admit_after=st.sampled_from([1, 1, 2, 3]),
    ttl_steps=st.sampled_from([None, 1, 2, 4]),
    max_rows=st.sampled_from([None, 1, 3, 6]),
    sweep_every=st.sampled_from([1, 1, 2, 3]),
)


@st.composite
def overlapping(draw: st.DrawFn, most_workers: int = 2) -> Steps:
    """Batches that share many keys with the batch before, with the one before that, or with neither."""
    workers = draw(st.integers(1, most_workers))
    kind = draw(st.sampled_from(["common", "every other", "drifting", "mixed"]))
    steps: Steps = []
    for step in range(draw(st.integers(2, 12))):
        pool = {
            "common": list(range(6)),
            "every other": [100 * (step % 2) + k for k in range(5)],
            "drifting": [step + k for k in range(5)],
            "mixed": [*range(3), 100 * (step % 2), 200 + step % 3, 1000 + step, -(2**63), 2**63 - 1],
        }[kind]
        steps.append([draw(st.lists(st.sampled_from(pool), max_size=5)) for _ in range(workers)])
    return steps


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    overlapping(),
    st.builds(
        Setting,
        policies,
        st.sampled_from(list(OPTIMIZERS)),
        st.sampled_from([1, 3]),
        st.booleans(),
        st.sampled_from(["float32", "float64"]),
    ),
    st.sampled_from([name for name in EXACT if name != "serial"]),
    st.sampled_from([None, None, 1, 3, 6]),
)
def test_bit_for_bit(steps: Steps, setting: Setting, schedule: str, most: int | None) -> None:
    """Promise: rows, state, usage and evictions equal serial's under every schedule, also when stopped early."""
    assert all(run(len(steps[0]), both, steps, setting, schedule, most))


def reads_one_batch_old(pipeline: TrainPipeline) -> None:
    old = OneBatchOld(pipeline.stage("embed"), pipeline.stage("update"), pipeline.device)
    pipeline.replace_stages(embed=old.embed, update=old.update)


def stale_alike(world: World, steps: Steps, setting: Setting, most: int | None) -> bool:
    stale_serial = trained(world, steps, setting, "serial", most, poison=reads_one_batch_old)
    return stale_serial == trained(world, steps, setting, "semi_async", most)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    overlapping(),
    st.builds(Setting, policies, st.sampled_from(list(OPTIMIZERS)), st.sampled_from([1, 3]), st.booleans()),
    st.sampled_from([None, None, 1, 3, 6]),
)
def test_semi_async_evicts_what_serial_evicts_that_reads_one_batch_old(
    steps: Steps, setting: Setting, most: int | None
) -> None:
    """Promise: admission, sweeps and usage are never stale, whatever rows are read."""
    assert all(run(len(steps[0]), stale_alike, steps, setting, most))


# The oracle.


class Oracle:
    """One worker's share of one table as a dict, with the rules written down independently."""

    def __init__(self, policy: EvictionPolicy, workers: int) -> None:
        self.policy, self.share = policy, None if policy.max_rows is None else -(-policy.max_rows // workers)
        self.rows: dict[int, list[Any]] = {}
        """Value, frequency, last batch."""
        self.waiting: dict[int, list[int]] = {}
        self.evicted: list[tuple[int, list[int]]] = []

    def sweep(self, batch: int) -> None:
        if batch == 0 or batch % self.policy.sweep_every:
            return
        gone = []
        if self.policy.ttl_steps is not None:
            old = batch - self.policy.ttl_steps
            gone += [k for k, (_, _, last) in self.rows.items() if last < old]
            self.waiting = {k: v for k, v in self.waiting.items() if v[1] >= old}
        for k in gone:
            del self.rows[k]
        if self.share is not None and len(self.rows) > self.share:
            may = sorted((frequency, last, k) for k, (_, frequency, last) in self.rows.items() if last != batch - 1)
            rare = [k for _, _, k in may[: len(self.rows) - self.share]]
            for k in rare:
                del self.rows[k]
            gone += rare
        if gone:
            self.evicted.append((batch, sorted(gone)))

    def update(self, batch: int, key: int, value: np.ndarray, grad: np.ndarray) -> None:
        """SGD, for keys that are frequent enough."""
        frequency = (self.rows[key][1] if key in self.rows else self.waiting.pop(key, [0, 0])[0]) + 1
        if frequency >= self.policy.admit_after:
            self.rows[key] = [value - 0.1 * grad, frequency, batch]
        else:
            self.waiting[key] = [frequency, batch]


def by_oracle(
    steps: Steps, policy: EvictionPolicy, first: dict[str, dict[int, np.ndarray]], weights: list[np.ndarray]
) -> tuple[list[dict[str, Any]], list[float], list[np.ndarray]]:
    """The tables of each worker, the losses, and the dense parameters."""
    workers, names = len(steps[0]), ("a", "b", "c")
    policies = {"a": policy, "b": policy, "c": replace(policy, admit_after=policy.admit_after + 1)}
    numbers = {"a": 0, "b": 1, "c": 0}
    tables = [{name: Oracle(policies[name], workers) for name in names} for _ in range(workers)]
    dense = [torch.tensor(w, requires_grad=True) for w in weights]
    losses = []

    def owner(name: str, key: int) -> Oracle:
        number = np.array([numbers[name]], np.uint16)
        return tables[int(owners_of(number, np.array([key]), workers)[0])][name]

    for batch, shares in enumerate(steps):
        keys = [key for share in shares for key in share]
        for of_worker in tables:
            for table in of_worker.values():
                table.sweep(batch)
        used = {}
        for name in names:
            for key in set(keys):
                row = owner(name, key).rows.get(key)
                used[name, key] = torch.tensor(first[name][key] if row is None else row[0], requires_grad=True)
        if keys:
            rows = [torch.cat([used[name, key] for name in names]) for key in keys]
            loss = (torch.stack(rows) @ dense[0].T + dense[1]).square().mean()
            loss.backward()
            losses.append(loss.item())
        else:
            losses.append(0.0)
        for (name, key), value in used.items():
            assert value.grad is not None
            owner(name, key).update(batch, key, value.detach().numpy(), value.grad.numpy())
        with torch.no_grad():
            for parameter in dense:
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return tables, losses, [p.detach().numpy() for p in dense]  # type: ignore[return-value]


def by_pipeline(world: World, steps: Steps, policy: EvictionPolicy) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        pipeline = make(world, Setting(policy, "sgd", dtype="float64"), "serial", folder)
        keys = np.unique([k for step in steps for share in step for k in share]).astype(np.int64)
        first = {n: dict(zip(keys.tolist(), pipeline.rows(n, keys).numpy())) for n in ("a", "b", "c")}
        weights = [p.detach().numpy().copy() for p in pipeline.model.parameters()]
        data = batches(steps, world.rank)
        losses = []
        while step := pipeline.progress(data):
            losses.append(step.loss)
        found: dict[str, Any] = {"first": first, "weights": weights, "losses": losses}
        for group, store in zip(pipeline.sparse.groups, pipeline.sparse.stores):
            for number, table in enumerate(group.tables):
                row_keys, slots = store.rows_of(number)
                values, state = store.read(slots)
                usage = group.eviction_columns(state).tolist()
                waiting: dict[int, list[int]] = {}
                if store.frequencies is not None:
                    waiting_keys, slots = store.frequencies.rows_of(number)
                    waiting = dict(zip(waiting_keys.tolist(), store.frequencies.read(slots)[0].tolist()))
                found[table.name] = (dict(zip(row_keys.tolist(), zip(values, usage))), waiting)
        found["dense"] = [p.detach().numpy().copy() for p in pipeline.model.parameters()]
        found["evicted"] = [(e.table, e.batch, e.keys.tolist()) for e in pipeline.sparse.take_evicted()]
        pipeline.close()
    return found


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(overlapping(), policies)
def test_oracle(steps: Steps, policy: EvictionPolicy) -> None:
    """Promise: the n-th batch with a key trains it, the right keys are evicted, and evicted keys start again."""
    parts = run(len(steps[0]), by_pipeline, steps, policy)
    tables, losses, dense = by_oracle(steps, policy, parts[0]["first"], parts[0]["weights"])
    for part, expected in zip(parts, tables):
        assert part["losses"] == pytest.approx(losses, rel=1e-9, abs=1e-12)
        for mine, wanted in zip(part["dense"], dense):
            np.testing.assert_allclose(mine, wanted, rtol=1e-9, atol=1e-12)
        for name, oracle in expected.items():
            rows, waiting = part[name]
            assert waiting == oracle.waiting, name
            assert {k: usage for k, (_, usage) in rows.items()} == {k: v[1:] for k, v in oracle.rows.items()}, name
            for key, (value, _) in rows.items():
                np.testing.assert_allclose(value, oracle.rows[key][0], rtol=1e-9, atol=1e-12)
            assert [(b, keys) for table, b, keys in part["evicted"] if table == name] == oracle.evicted, name


# Mistakes that must be detected.

BUSY: Steps = [
    [[k for k in range(40) if (k * 7 + t * t) % (2 + k % 5) == 0][:9] + [100 + t, 100 + t - 1, 200 + t % 2]]
    for t in range(14)
]
STRICT = Setting(EvictionPolicy(ttl_steps=2, max_rows=9, sweep_every=1))
PATIENT = Setting(EvictionPolicy(admit_after=2, ttl_steps=3, max_rows=6, sweep_every=2))


def last_batch_not_spared(pipeline: TrainPipeline) -> None:
    """A sweep does not know which keys the batch before it touches."""
    for evictor in pipeline.sparse.evictors:
        assert evictor is not None
        retrieve = evictor.retrieve
        evictor.retrieve = lambda s, p, b, skip, n, previous, sec, retrieve=retrieve: retrieve(  # type: ignore[method-assign]
            s, p, b, skip, n, None, sec
        )


def rows_to_come_not_counted(pipeline: TrainPipeline) -> None:
    """The row budget ignores rows that the batch before the sweep is about to add."""
    for evictor in pipeline.sparse.evictors:
        assert evictor is not None
        evictor._coming = lambda store, batch, tables, keys, evictor=evictor: np.zeros(  # type: ignore[method-assign]
            len(evictor.group.tables), np.int64
        )


def marked_keys_still_seen(pipeline: TrainPipeline) -> None:
    """Keys that a sweep marked are read until they are removed."""
    for evictor in pipeline.sparse.evictors:
        assert evictor is not None
        evictor._hide = lambda store, plan, into, found: None  # type: ignore[method-assign]


def removed_at_once(pipeline: TrainPipeline) -> None:
    """A sweep removes keys at once, whether or not its batch will be trained."""
    for evictor in pipeline.sparse.evictors:
        assert evictor is not None
        sweep = evictor._sweep

        def now(store: Any, batch: int, *rest: Any, evictor: Evictor = evictor, sweep: Any = sweep) -> None:
            sweep(store, batch, *rest)
            evictor._remove(store, batch)

        evictor._sweep = now  # type: ignore[method-assign]


def counted_when_retrieved(pipeline: TrainPipeline) -> None:
    """Use is counted when rows are read, not when they are trained: rows that `sync` brings are missed."""
    for evictor in pipeline.sparse.evictors:
        assert evictor is not None
        retrieve, update = evictor.retrieve, evictor.update

        def count(
            store: Any, plan: Any, into: Any, *rest: Any, evictor: Evictor = evictor, retrieve: Any = retrieve
        ) -> Any:
            found = retrieve(store, plan, into, *rest)
            usage = evictor.group.eviction_columns(into[1])
            eviction_kernels.count_use(usage, rest[1], 2**30, 1, np.empty(0, np.int64))
            return found

        def no_count(buffer: Any, batch: int, lr: float, evictor: Evictor = evictor, update: Any = update) -> None:
            usage = evictor.group.eviction_columns(buffer.state)
            before = usage.copy()
            usage[:, 0] -= 1
            update(buffer, batch, lr)
            usage[:] = before

        evictor.retrieve, evictor.update = count, no_count  # type: ignore[method-assign]


def trained_before_admission(pipeline: TrainPipeline) -> None:
    """Rows that are not admitted are trained too.  They are never stored, but `sync` passes them on."""
    for evictor in pipeline.sparse.evictors:
        assert evictor is not None

        def all_of_them(buffer: Any, batch: int, lr: float, evictor: Evictor = evictor) -> None:
            usage = evictor.group.eviction_columns(buffer.state)
            eviction_kernels.count_use(usage, batch, 2**30, 1, np.empty(0, np.int64))
            evictor.group.optimizer.apply(buffer.values, buffer.state, buffer.grads, lr, batch + 1)

        evictor.update = all_of_them  # type: ignore[method-assign]


def differs(
    world: World,
    steps: Steps,
    setting: Setting,
    schedule: str,
    most: int | None,
    poison: Callable[[TrainPipeline], None],
) -> bool:
    right = trained(world, steps, setting, "serial", most)
    assert sum(right["evicted"].values()) > 5, "the data must cause evictions"
    assert right == trained(world, steps, setting, schedule, most)
    return right != trained(world, steps, setting, schedule, most, poison)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["dbp", "nested"])
@pytest.mark.parametrize(
    "poison, setting, most",
    [
        (last_batch_not_spared, STRICT, None),
        (rows_to_come_not_counted, STRICT, None),
        (marked_keys_still_seen, STRICT, None),
        (removed_at_once, STRICT, 9),
        (counted_when_retrieved, PATIENT, None),
        (trained_before_admission, PATIENT, None),
        (last_batch_not_spared, PATIENT, None),
        (rows_to_come_not_counted, PATIENT, None),
        (removed_at_once, PATIENT, 10),
    ],
)
def test_what_breaks_a_sweep_changes_the_result(
    poison: Callable[[TrainPipeline], None], setting: Setting, most: int | None, schedule: str
) -> None:
    """The comparison with serial can fail: each of these mistakes changes the result."""
    assert run(1, differs, BUSY, setting, schedule, most, poison) == [True]


def told_of_the_batch_before(pipeline: TrainPipeline) -> None:
    """A sweep gets the keys of the batch before it although they are in the store, as with two threads."""
    for evictor in pipeline.sparse.evictors:
        assert evictor is not None
        retrieve = evictor.retrieve
        plans: list[Any] = [None]

        def told(store: Any, plan: Any, buffer: Any, skip: Any, batch: int, previous: Any, seconds: float,
                 plans: list[Any] = plans, retrieve: Any = retrieve) -> Any:  # fmt: skip
            plans.append(plan)
            return retrieve(store, plan, buffer, skip, batch, plans[-2], seconds)

        evictor.retrieve = told  # type: ignore[method-assign]


def same_if_told(world: World, setting: Setting) -> bool:
    plain = trained(world, BUSY, setting, "serial")
    return plain == trained(world, BUSY, setting, "serial", poison=told_of_the_batch_before)


@pytest.mark.parametrize("setting", [STRICT, PATIENT])
def test_a_sweep_does_not_depend_on_whether_the_batch_before_is_in_the_store(setting: Setting) -> None:
    """Promise: retrieve may run before or after writeback of the batch before."""
    assert run(1, same_if_told, setting) == [True]


def epochs(world: World, setting: Setting, schedule: str) -> dict[str, Any]:
    """Two iterators, one after the other, with lookups in between."""
    with tempfile.TemporaryDirectory() as folder:
        pipeline = make(world, setting, schedule, folder)
        seen = []
        for part in (BUSY[:5], BUSY[5:]):
            data = batches(part, 0)
            while step := pipeline.progress(data):
                seen.append(step.loss)
                if step.batch % 3 == 0:
                    seen.append(pipeline.rows("a", np.arange(300)).numpy().tobytes())
        left = left_behind(pipeline)
        pipeline.close()
    return {**left, "seen": seen}


@pytest.mark.slow
@pytest.mark.parametrize("setting", [STRICT, PATIENT, replace(STRICT, disk=True)])
def test_epochs_and_lookups_in_between(setting: Setting) -> None:
    """Promise: a second epoch sweeps as serial does, and lookups between two steps see serial's tables."""
    expected = run(1, epochs, setting, "serial")
    for schedule in ("dbp", "fwp", "nested"):
        assert run(1, epochs, setting, schedule) == expected


def with_a_bad_batch(world: World, setting: Setting) -> tuple[dict[str, Any], dict[str, Any]]:
    """Serial without the bad batches, and with them, each skipped after its error."""
    good = trained(world, BUSY, setting, "serial")
    with tempfile.TemporaryDirectory() as folder:
        pipeline = make(world, setting, "serial", folder)
        data = batches(BUSY, 0)
        losses = []
        for number in range(len(BUSY)):
            if number % 3 == 2:
                bad = batches([[[number, 1, 2, 500 + number]]], 0)
                agree = pipeline.engine.stage("accumulate")

                def poisoned(context: Any, micro: int, agree: Any = agree) -> None:
                    agree(context, micro)
                    context.row_squares = [float("nan")]

                pipeline.engine.replace(accumulate=poisoned)
                with pytest.raises(NotFinite):
                    pipeline.progress(bad)
                pipeline.engine.replace(accumulate=agree)
            step = pipeline.progress(data)
            assert step is not None
            losses.append(step.loss)
        left = left_behind(pipeline)
        pipeline.close()
    return good, {**left, "losses": losses}


@pytest.mark.parametrize("setting", [STRICT, PATIENT])
def test_a_batch_that_fails_evicts_and_counts_nothing(setting: Setting) -> None:
    """Promise: after skipping a batch that is not finite, sweeps and frequencies are as if it had never existed."""
    [(good, skipped)] = run(1, with_a_bad_batch, setting)
    assert good == skipped


def stale_reads(world: World, steps: Steps, setting: Setting, schedule: str) -> bool:
    plain = trained(world, steps, setting, schedule)
    return plain == trained(world, steps, replace(setting, options={"check_staleness": True}), schedule)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["serial", "nested"])
@pytest.mark.parametrize("setting", [STRICT, PATIENT, replace(PATIENT, disk=True)])
def test_no_false_alarm_of_stale_rows(setting: Setting, schedule: str) -> None:
    """Promise: --check staleness accepts keys that wait for a row and keys that start again, and changes nothing."""
    assert run(1, stale_reads, BUSY, setting, schedule) == [True]


def by_the_clock(world: World, schedule: str) -> tuple[dict[str, Any], list[tuple[int, int]], dict[str, Any]]:
    """With a clock that only worker 0 has (one second per batch), then under serial with the horizons that it gave."""
    steps = BUSY if world.size == 1 else [[step[0], [k + 1 for k in step[0]]] for step in BUSY]
    policy = EvictionPolicy(ttl_minutes=4 / 60, sweep_every=2)
    with tempfile.TemporaryDirectory() as folder:
        pipeline = make(world, Setting(policy), schedule, folder)
        route = pipeline.engine.stage("route")

        def timed(context: Any, micro: int) -> None:
            pipeline.sparse.now = lambda: float(context.number) if world.rank == 0 else -1e9
            route(context, micro)

        pipeline.engine.replace(route=timed)
        data = batches(steps, world.rank)
        losses = []
        while step := pipeline.progress(data):
            losses.append(step.loss)
        first = {**left_behind(pipeline), "losses": losses}
        horizons = [evictor.horizons for evictor in pipeline.sparse.evictors if evictor is not None]
        pipeline.close()
    assert horizons[0] == horizons[1]
    again = trained(world, steps, Setting(replace(policy, ttl_horizons=tuple(horizons[0]))), "serial")
    return first, horizons[0], again


@pytest.mark.slow
@pytest.mark.parametrize("workers, schedule", [(1, "serial"), (1, "nested"), (2, "dbp")])
def test_minutes_are_agreed_on_and_can_be_given_back(workers: int, schedule: str) -> None:
    """Promise: worker 0's clock decides for all, and its horizons give the same tables under another schedule."""
    for first, horizons, again in run(workers, by_the_clock, schedule):
        # Sweeps run before batches 2, 4, 6, ...; with a TTL of four seconds, the horizon of batch 6 is batch 2.
        assert horizons == [(6, 2), (8, 4), (10, 6), (12, 8)]
        assert first == again and sum(first["evicted"].values()) > 5


def test_a_long_run_keeps_coarse_times_and_never_evicts_too_early() -> None:
    """Promise: the clock's memory is bounded, and coarser times only delay evictions."""
    clock = AgreedClock()
    for batch in range(100_000):
        clock.note(batch, 0.5 * batch)
    assert len(clock._batches) <= MOST
    for age in (0.5, 10.0, 1000.0, 30_000.0):
        right = max(0, int((49_999.5 - age) / 0.5))
        assert right - 64 <= clock.horizon(49_999.5, age) <= right
    clock.note(100_000, 3.0)  # a clock that runs backwards
    assert clock.horizon(49_999.5, 10.0) <= 99_979
    assert clock.horizon(49_999.5, 1e9) == 0
