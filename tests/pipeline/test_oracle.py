"""Whatever the number of workers and micro-batches, training is the oracle's: plain torch on the whole global batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet

import oracle
import samples
from nestpipe import SGD, Adagrad, Adam, RowWiseAdagrad
from nestpipe.schedule import EXACT as EXACT_SCHEDULES
from oracle import Trained, distance
from training import Part, Setting, joined, train_all
from workers import run

OPTIMIZERS = {
    "sgd": SGD(lr=0.3),
    "rowwise": RowWiseAdagrad(lr=0.05),
    "adagrad": Adagrad(lr=0.05),
    "adam": Adam(lr=0.01),
}
MICRO_BATCHES = (1, 4)
FAST = [("dlrm", 1), ("dlrm", 2)]


def cases(*workers: int) -> list[ParameterSet]:
    """Each model on these numbers of workers; all that is trained besides FAST is slow."""
    each = [(model, count) for model in samples.MODELS for count in workers]
    return [pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow) for case in each]


EXACT = 1e-9
"""Of float64: the largest difference, relative to the largest entry of the tensor.  Rounding leaves some 1e-14."""


@cache
def trained(model: str, workers: int) -> dict[tuple[str, int], list[Part]]:
    """All optimizers and numbers of micro-batches in one job: (optimizer, N) to what each worker has."""
    names = [(name, n) for name in OPTIMIZERS for n in MICRO_BATCHES]
    settings = [Setting(model, OPTIMIZERS[name], n) for name, n in names]
    by_rank = run(workers, train_all, settings, deadline=120)
    return {name: [parts[i] for parts in by_rank] for i, name in enumerate(names)}


def plain(setting: Setting, like: Part) -> Trained:
    """The oracle's training from the same first rows and dense parameters."""
    model = samples.model(setting.model, setting.dtype)
    model.load_state_dict(like.first_dense)
    batches = [samples.batch(setting.model, b, setting.dtype) for b in setting.batches()]
    return oracle.train(
        model,
        like.first_rows,
        batches,
        setting.optimizer,
        setting.dense_optimizer,
        setting.clip_norm,
        setting.rate,
        setting.rate,
        one_batch_old=setting.schedule == "semi_async",
    )


@cache
def expected(model: str, optimizer: str) -> Trained:
    """One oracle for all: first rows and parameters, and so everything, depend on neither workers nor micro-batches."""
    torch.set_num_threads(1)
    return plain(Setting(model, OPTIMIZERS[optimizer]), trained(model, 1)[optimizer, 1][0])


def assert_alike(found: Trained, wanted: Trained, tolerance: float) -> None:
    errors = {"losses": distance(np.array(found.losses), np.array(wanted.losses))}
    for what in ("rows", "state", "dense", "dense_state"):
        ours, theirs = getattr(found, what), getattr(wanted, what)
        assert ours.keys() == theirs.keys()
        errors |= {f"{what} of {name}": distance(ours[name], theirs[name]) for name in theirs}
    for table, keys in wanted.keys.items():
        assert np.array_equal(found.keys[table], keys), f"rows of {table} are those of the keys that were trained"
    wrong = {name: error for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"not within {tolerance:g}: {wrong}"


@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("model", "workers"), cases(1, 2, 3))
def test_training_is_the_oracles(model: str, workers: int, optimizer: str, micro_batches: int) -> None:
    """Promise: 20 steps give the oracle's losses, rows, optimizer state and dense parameters.

    Shards are uneven, features ragged, bags empty, one worker has an empty batch, one batch has a single sample, and one
    worker's data ends earlier (samples.shard).
    """
    parts = trained(model, workers)[optimizer, micro_batches]
    wanted = expected(model, optimizer)
    assert parts[0].samples == [len(b) for b in Setting(model, SGD()).batches()]
    assert_alike(joined(parts), wanted, EXACT)
    for part in parts:
        for table, rows in part.asked.items():
            assert distance(rows, wanted.rows[table]) <= EXACT, f"pipeline.rows of {table}"


@pytest.mark.slow
@pytest.mark.parametrize("model", samples.MODELS)
def test_first_values_depend_on_seed_table_and_key_alone(model: str) -> None:
    """Promise: a new key starts from the same bits on any number of workers; tables and keys start differently."""
    one = trained(model, 1)["sgd", 1][0].first_rows
    for workers in (2, 3):
        for part in trained(model, workers)["adam", 4]:
            assert all(torch.equal(part.first_rows[table][1], one[table][1]) for table in one)
    values = torch.cat([rows.flatten() for _, rows in one.values()])
    assert len(torch.unique(values)) == len(values)  # DLRM's tables have keys in common


@pytest.mark.parametrize(("model", "workers"), cases(1, 3))
def test_float32_gradients_of_the_first_step(model: str, workers: int) -> None:
    """Promise: in float32 the first step's summed gradients are the oracle's (in float64) to 1e-6 of the largest."""
    setting = Setting(model, SGD(), 4, steps=1, dtype="float32")
    parts = [p[0] for p in run(workers, train_all, [setting])]
    model64 = samples.model(model, "float64")
    model64.load_state_dict(parts[0].first_dense)
    batch = samples.batch(model, setting.batches()[0], "float32")
    # the same numbers in both: dense features are rounded to float32 before the oracle gets them
    batch.dense = None if batch.dense is None else batch.dense.double()
    first_rows = {table: (keys, rows.double()) for table, (keys, rows) in parts[0].first_rows.items()}
    wanted = oracle.train(model64, first_rows, [batch], SGD(), None)
    found = joined(parts)
    errors = {name: distance(found.table_grads[name], wanted.table_grads[name]) for name in wanted.table_grads}
    # the dense gradient is one vector: the entry of a lone bias is what is left of a sum that nearly cancels
    errors["dense"] = distance(flat(found.dense_grads), flat(wanted.dense_grads))
    errors["loss"] = distance(np.array(found.losses), np.array(wanted.losses))
    assert max(errors.values()) <= 1e-6, errors


@pytest.mark.parametrize(("model", "workers"), cases(1, 2, 3))
def test_micro_batches_change_nothing_but_rounding(model: str, workers: int) -> None:
    """Promise: the first step's gradients with 4 micro-batches are those with 1, to float64's rounding."""
    one, four = (joined(trained(model, workers)["adam", n]) for n in MICRO_BATCHES)
    for table in one.table_grads:
        assert np.array_equal(one.keys[f"first {table}"], four.keys[f"first {table}"])
        assert distance(four.table_grads[table], one.table_grads[table]) <= 1e-13
    for name in one.dense_grads:
        assert distance(four.dense_grads[name], one.dense_grads[name]) <= 1e-13
    assert four.losses[0] == pytest.approx(one.losses[0], rel=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "workers"), cases(1, 2, 3))
def test_two_runs_are_bit_for_bit_alike(model: str, workers: int) -> None:
    """Promise: the same training twice gives the same bits, in float32 too."""
    settings = [Setting(model, OPTIMIZERS[o], 4, steps=6, dtype="float32") for o in ("rowwise", "adam")]
    first, second = (run(workers, train_all, settings) for _ in range(2))
    for a, b in zip(first, second):
        for one, two in zip(a, b):
            assert bits(one.trained) == bits(two.trained)


@pytest.mark.parametrize(("model", "workers"), cases(1, 2, 3))
@pytest.mark.parametrize("schedule", [name for name in EXACT_SCHEDULES if name != "serial"])
def test_every_schedule_is_bit_for_bit_serial(schedule: str, model: str, workers: int) -> None:
    """Promise: a schedule changes when things are done, and not one bit of what comes out."""
    plain = [Setting(model, OPTIMIZERS[o], n, steps=9, dtype="float32") for o, n in [("adagrad", 1), ("adam", 4)]]
    by_rank = run(workers, train_all, [*plain, *(replace(setting, schedule=schedule) for setting in plain)])
    for parts in by_rank:
        for serial, other in zip(parts[: len(plain)], parts[len(plain) :]):
            assert bits(serial.trained) == bits(other.trained)


@pytest.mark.parametrize(("model", "workers"), cases(1, 2, 3))
def test_semi_async_is_the_oracle_that_reads_tables_one_batch_old(model: str, workers: int) -> None:
    """Promise: gradients are those of rows one batch old, and each update is applied on top of the one before.

    Rows that the last batch did not touch have not changed since, so for the oracle whole tables are one batch old.
    """
    settings = [Setting(model, o, n, steps=12, schedule="semi_async") for o in OPTIMIZERS.values() for n in (1, 3)]
    by_rank = run(workers, train_all, settings, deadline=120)
    torch.set_num_threads(1)
    for i, setting in enumerate(settings):
        parts = [parts[i] for parts in by_rank]
        wanted = plain(setting, parts[0])
        assert_alike(joined(parts), wanted, EXACT)
        fresh = plain(replace(setting, schedule="serial"), parts[0])
        assert distance(np.array(fresh.losses), np.array(wanted.losses)) > 10 * EXACT, (
            "staleness makes no difference here"
        )


def flat(grads: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([grads[name].ravel() for name in sorted(grads)])


def bits(trained: Trained) -> list[bytes]:
    found = [np.array(trained.losses).tobytes()]
    for part in (trained.keys, trained.rows, trained.state, trained.dense, trained.dense_state):
        found += [name.encode() + value.tobytes() for name, value in sorted(part.items())]
    return found
