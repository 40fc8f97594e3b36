"""Another number of micro-batches rounds differently and trains the same: gradients and first losses agree in every schedule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nestpipe import RowWiseAdagrad
from oracle import distance
from training import Part, Setting, train_all
from workers import run

GRADIENTS, LOSSES = 1e-6, 1e-5
"""Of float32: the largest difference over the largest entry of a gradient; a loss relative to itself."""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 3))])
@pytest.mark.parametrize("model", ["dlrm", "hstu"])
def test_every_number_trains_what_one_trains(model: str, workers: int) -> None:
    """Promise: first-step gradients to 1e-6 and the losses of the first 5 steps to 1e-5, with 1 as with 2, 4 and 8."""
    one = Setting(model, RowWiseAdagrad(), 1, steps=5, dtype="float32")
    several = [replace(one, micro_batches=n, schedule=s) for n in (2, 4, 8) for s in ("serial", "fwp", "nested")]
    for first, *others in run(workers, train_all, [one, *several]):
        for setting, other in zip(several, others):
            assert_close(first, other, f"{setting.schedule} N={setting.micro_batches}")


def assert_close(one: Part, other: Part, what: str) -> None:
    for kind in ("table_grads", "dense_grads"):
        wanted, found = getattr(one.trained, kind), getattr(other.trained, kind)
        assert wanted.keys() == found.keys() and wanted, what
        for name in wanted:
            assert distance(found[name], wanted[name]) <= GRADIENTS, f"{what}: {kind} of {name}"
    np.testing.assert_allclose(other.trained.losses, one.trained.losses, rtol=LOSSES, err_msg=what)
