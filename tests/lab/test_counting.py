"""What must travel between hosts, counted from keys: by hand on a few keys, and against the engine's own windows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.data.batch import Batch
from nestpipe.keys import owners_of
from nestpipe.lab.counting import (
    BatchKeys,
    Counted,
    count_dense,
    count_flat,
    count_replicas,
    count_rung,
    keys_of,
    tables_of,
)
from nestpipe.lab.layout import Layout
from nestpipe.lab.settings import read_settings
from nestpipe.lab.workloads import HSTUWorkload
from nestpipe.nn.collections import collections_in, place_lookups
from nestpipe.tables.optimizers import RowWiseAdagrad

DIM = 4
HEADER = 8 * (3 + 2)  # two micro-batches, one group of tables


def batch(*keys: int) -> BatchKeys:
    return [{0: np.array(keys, np.int64)}]


def owned_by(rank: int, workers: int, count: int) -> list[int]:
    keys = np.arange(1000, dtype=np.int64)
    found = keys[owners_of(np.zeros(1000, np.uint16), keys, workers) == rank]
    return [int(key) for key in found[:count]]


def test_keys_counted_by_hand() -> None:
    """Promise: flat, each worker's rows of other hosts; with groups, each row of a host once for every other host."""
    layout = Layout(2, 2)
    (here,), (beside,), (there,) = (owned_by(rank, 4, 1) for rank in (0, 1, 2))
    batches = [batch(here, there), batch(beside, there), batch(), batch(there)]
    flat = count_flat(batches, [DIM], layout, 2)
    # Workers 0 and 1 each ask the other host for one key; worker 3 for none.
    assert flat == Counted(keys=2 * 12, rows=2 * 16, gradients=2 * 16, headers=8 * HEADER)
    grouped = count_replicas(batches, [DIM], layout, 2)
    # Host 0 touches three rows, of which its workers share one; host 1 touches one.
    assert grouped == Counted(keys=4 * 12, rows=0, gradients=4 * 16, headers=4 * HEADER)
    three = count_replicas([*batches, batch(), batch()], [DIM], Layout(3, 2), 2)
    assert (three.keys, three.gradients) == (2 * 4 * 12, 2 * 4 * 16)


def test_dense_gradients_leave_a_host_once_around_the_ring() -> None:
    assert count_dense(100, Layout(1, 4)) == 0
    assert count_dense(100, Layout(2, 1)) == 2 * 400  # each sends its own to the other
    assert count_dense(100, Layout(2, 2)) == pytest.approx(2 * 1.5 * 400)


worker_keys = st.lists(st.integers(0, 40), max_size=30)


@settings(max_examples=50)
@given(st.integers(2, 3), st.integers(1, 3), st.data())
def test_sharing_decides(hosts: int, per_host: int, data: st.DataObject) -> None:
    """Promise: with two hosts, one row of a host costs at most what its workers' remote rows would, in the worst split."""
    layout = Layout(hosts, per_host)
    batches = [batch(*sorted(set(data.draw(worker_keys)))) for _ in range(layout.workers)]
    grouped = count_replicas(batches, [DIM], layout, 1)
    asked = sum(len(one[0][0]) for one in batches)
    assert grouped.gradients <= asked * (hosts - 1) * DIM * 4 and grouped.rows == 0
    if per_host == 1:  # nothing to share inside a host
        assert grouped.gradients == asked * (hosts - 1) * DIM * 4
    flat = count_flat(batches, [DIM], layout, 1)
    assert flat.rows == flat.gradients <= asked * DIM * 4


def test_keys_of_a_workload_are_those_that_the_engine_sends() -> None:
    """Promise: the plain count agrees with the engine's windows: distinct keys by table, and who owns them."""
    found = read_settings({"kind": "hstu", "batch": 4, "length": 6, "items": 200, "groups": 5, "dim": 16})
    workload = HSTUWorkload(found.workload, found.options)
    model = workload.model()
    one: Batch = next(workload.batches(0))
    places, dims = tables_of(model)
    (lookups,), _ = place_lookups(collections_in(model), RowWiseAdagrad())
    window, _ = lookups.plan([one.select(torch.arange(2)), one.select(torch.arange(2, 4))], 4)
    (counted,) = keys_of(one, places)
    assert dims == [16]
    assert sorted(zip(window.tables.tolist(), window.keys.tolist())) == [
        (table, key) for table, keys in sorted(counted.items()) for key in keys.tolist()
    ]
    remote = sum(window.first_sizes[m][owner] for m in range(2) for owner in (2, 3))
    assert count_flat([[counted], *[batch()] * 3], dims, Layout(2, 2), 2).rows == remote * 16 * 4


def test_rungs_that_are_counted() -> None:
    """Promise: by the rung's own groups; what is left out or not understood is not counted as if it were."""
    small = {"batch": 32, "features": 2, "ids": 50, "dim": 8, "compute_ms": 1.0, "dense_parameters": 10}
    small |= {"distinct_batches": 2, "micro_batches": 2}
    layout = Layout(2, 2)
    flat, host = (
        count_rung(read_settings(small), layout),
        count_rung(read_settings({**small, "group_size": "host"}), layout),
    )
    assert flat is not None and host is not None and flat.rows and not host.rows
    assert flat.dense == host.dense == count_dense(10, layout)
    assert host == count_rung(read_settings({**small, "group_size": 2}), layout)
    assert flat == count_rung(read_settings({**small, "group_size": 4}), layout)
    for other in ({"group_size": 1}, {"only": "wire"}, {"micro_batches": "auto"}):
        assert count_rung(read_settings({**small, **other}), layout) is None
