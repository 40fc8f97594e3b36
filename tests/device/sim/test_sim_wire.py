"""Device collectives over gloo, on worker processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nestpipe.comm.world import World
from nestpipe.device import sim
from workers import Died, run, run_once

ORDERS = (("late", 0), ("random", 1), ("random", 2), ("eager", 0))


def _group() -> dist.ProcessGroup:
    sim.enable()
    return sim.new_wire_group(dist.new_group(backend="gloo"))


def _splits(size: int) -> list[list[int]]:
    """How many rows rank i sends to rank j; one of them sends nothing at all, one gets nothing from itself."""
    return [[(i + 2 * j) % 4 if i else 0 for j in range(size)] for i in range(size)]


def _exchanges(world: World, order: str, seed: int) -> list[str]:
    """all_to_all with uneven, empty and even splits, all_reduce and broadcast against what they must give."""
    group = _group()
    sim.configure(order=order, seed=seed)
    device = torch.get_device_module("sim")
    rank, size, splits = world.rank, world.size, _splits(world.size)
    with device.stream(device.Stream()):
        rows = torch.cat([torch.full((n, 3), 10.0 * rank + j, device="sim") for j, n in enumerate(splits[rank])])
        out_splits = [splits[i][rank] for i in range(size)]
        out = torch.empty(sum(out_splits), 3, device="sim")
        work = dist.all_to_all_single(out, rows, out_splits, splits[rank], group=group, async_op=True)
        total = torch.full((5,), float(rank), device="sim")
        dist.all_reduce(total, group=group)
        nothing = torch.empty(0, 3, device="sim", dtype=torch.float64)
        dist.all_to_all_single(torch.empty_like(nothing), nothing, [0] * size, [0] * size, group=group)
        dist.all_reduce(torch.empty(0, device="sim"), group=group)
        even = torch.empty(size, dtype=torch.bfloat16, device="sim")
        dist.all_to_all_single(even, torch.full((size,), float(rank), device="sim").bfloat16(), group=group)
        told = torch.full((2,), rank, device="sim")
        dist.broadcast(told, src=size - 1, group=group)
        assert work is not None
        work.wait()
        got = out * 1
    want = torch.cat([torch.full((splits[i][rank], 3), 10.0 * i + rank) for i in range(size)])
    device.synchronize()
    assert torch.equal(got.cpu(), want) and work.is_completed() and work.exception() is None
    assert total.tolist() == [sum(range(size))] * 5
    assert even.float().tolist() == list(range(size))
    assert told.tolist() == [size - 1] * 2
    return sim.report().races


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_collectives_give_what_gloo_gives(workers: int) -> None:
    """Promise: every order gives the right rows, sums and broadcasts, and a right program has no race."""
    for order, seed in ORDERS:
        assert run(workers, _single if workers == 1 else _exchanges, order, seed) == [[]] * workers


def _single(world: World, order: str, seed: int) -> list[str]:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return _exchanges(world, order, seed)


def _alone(world: World) -> list[float]:
    sim.enable()
    group = sim.new_wire_group(None)
    x = torch.arange(4.0, device="sim")
    y = torch.empty_like(x)
    dist.all_reduce(x, group=group)
    dist.all_to_all_single(y, x, [4], [4], group=group)
    return y.tolist()


def test_a_single_worker_needs_no_process_group() -> None:
    """Promise: without torch.distributed a group of one gives back what it was given."""
    assert run(1, _alone) == [[0.0, 1.0, 2.0, 3.0]]


def _forgetful(world: World) -> tuple[bool, list[str]]:
    group = _group()
    sim.configure()
    x = torch.ones(2, device="sim")
    out = torch.empty(2, device="sim")
    work = dist.all_to_all_single(out, x, group=group, async_op=True)
    early = (out * 1).tolist()
    races = sim.report().races
    assert work is not None
    work.wait()
    assert out.tolist() == [1.0, 1.0]
    return early == [1.0, 1.0], races


def test_a_missing_wait_is_noticed() -> None:
    """Promise: who does not wait for the work is told about a race, and reads poison unless the bytes were there early."""
    for _, races in run(2, _forgetful):
        assert races and "all_to_all" in races[0] and "test_sim_wire.py" in races[0]


def _dropped_input(world: World) -> float:
    group = _group()
    sim.configure()
    x = torch.ones(1000, device="sim")
    dist.all_reduce(x, group=group, async_op=True)
    del x
    y = torch.zeros(1000, device="sim")  # must not get the memory of x, which the wire still uses
    torch.get_device_module("sim").synchronize()
    assert sim.report().races == []
    return y.sum().item()


def test_tensors_stay_until_the_wire_is_done() -> None:
    """Promise: inputs and outputs are recorded for the group's stream."""
    assert run(2, _dropped_input) == [0.0, 0.0]


def _mixed(world: World) -> list[str]:
    group = _group()
    told = []
    for tensor in (torch.ones(2), torch.ones(4, 2, device="sim").t()):
        try:
            dist.all_reduce(tensor, group=group)
        except (RuntimeError, ValueError) as error:
            told.append(str(error))
    return told


def test_wrong_tensors_are_refused_at_once() -> None:
    """Promise: host tensors and strided ones are refused, with a word about what to do."""
    told = run(2, _mixed)[0]
    assert "gloo" in told[0] and "contiguous" in told[1]


def _aborted(world: World) -> tuple[bool, str, str, float]:
    """Rank 1 never joins.  Rank 0 polls, aborts, and both a waiting thread and later operations are told."""
    group = _group()
    sim.configure()
    if world.rank == 1:
        dist.barrier()
        return False, "", "", 0.0
    x = torch.ones(2, device="sim")
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    work.wait()
    told: list[str] = []

    def waits() -> None:
        try:
            x.cpu()
        except sim.DeviceFault as fault:
            told.append(str(fault))

    waiter = threading.Thread(target=waits)
    waiter.start()
    polled = [work.is_completed() for _ in range(5)]
    began = time.monotonic()
    group.abort()
    waiter.join(10)
    seconds = time.monotonic() - began
    assert not waiter.is_alive() and work.exception() is not None
    with torch.get_device_module("sim").stream(torch.get_device_module("sim").Stream()):
        fresh = torch.ones(2, device="sim")
        dist.all_reduce(fresh, group=group)
        try:
            fresh.cpu()
        except sim.DeviceFault as fault:
            told.append(str(fault))
        untouched = torch.get_device_module("sim").Stream()
    with torch.get_device_module("sim").stream(untouched):
        assert torch.ones(3, device="sim").sum().item() == 3  # other streams go on
    dist.barrier()
    return any(polled), told[0], told[1], seconds


def test_abort_ends_who_waits() -> None:
    """Promise: a stalled peer leaves polls False; after abort waiting and later operations are faults, at once."""
    polled, waiting, later, seconds = run_once(2, _aborted, timeout=20.0)[0]
    assert not polled and seconds < 5
    assert "all_reduce" in waiting and "aborted" in waiting and "test_sim_wire.py" in waiting
    assert "aborted" in later


def _killed(world: World) -> tuple[bool, str, str] | None:
    group = _group()
    sim.configure()
    x = torch.ones(2, device="sim")
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0, 2.0]
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(x, group=group, async_op=True)
    assert work is not None
    until = time.monotonic() + 15
    while not work.is_completed() and time.monotonic() < until:
        time.sleep(0.01)
    work.wait()
    try:
        x.cpu()
    except sim.DeviceFault as fault:
        return work.is_completed(), str(work.exception()), str(fault)
    return None


def test_a_killed_peer_is_a_fault_of_the_work() -> None:
    """Promise: gloo's error becomes the work's, and a DeviceFault for who waits."""
    left, died = run_once(2, _killed, timeout=20.0)
    assert isinstance(died, Died)
    completed, error, fault = left
    assert completed and error and "all_reduce" in fault


def _left(world: World) -> float:
    group = _group()
    sim.configure()
    x = torch.ones(2, device="sim")
    dist.all_reduce(x, group=group)
    total = x.sum().item()
    world.leave()
    return total


def test_workers_can_leave() -> None:
    """Promise: ending torch.distributed ends device groups as well."""
    assert run_once(2, _left, timeout=20.0) == [4.0, 4.0]


def test_the_wire_needs_no_wait_by_the_host(device: Any) -> None:
    """Promise: issuing and waiting for a collective is no host sync."""
    group = sim.new_wire_group(None)
    x = torch.ones(3, device="sim")
    dist.all_reduce(x, group=group)
    y = x + 1
    assert sim.report().total == 0
    assert y.tolist() == [2.0, 2.0, 2.0]
