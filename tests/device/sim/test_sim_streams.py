"""Streams, events, orders, host syncs and faults of the simulated device."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from nestpipe.device import sim


def _nan(x: torch.Tensor) -> bool:
    return bool(x.isnan().all())


def test_nothing_runs_before_somebody_waits(device: Any) -> None:
    """Promise: in late order results are poison until the host or an event asks for them."""
    x = torch.ones(4, device="sim")
    y = x + 1
    assert _nan(y.inner) and _nan(x.inner)
    assert not device.current_stream().query()
    device.current_stream().synchronize()
    assert y.inner.tolist() == [2.0] * 4
    assert device.current_stream().query()


def test_events_order_streams(device: Any) -> None:
    """Promise: what a stream is given after `wait_event` sees what came before the event, in every order."""
    for order, seed in (("late", 0), ("eager", 0), *(("random", seed) for seed in range(8))):
        sim.configure(order=order, seed=seed)
        a, b = device.Stream(), device.Stream()
        with device.stream(a):
            x = torch.zeros(3, device="sim")
            for _ in range(10):
                x += 1
        b.wait_event(a.record_event())
        with b:
            assert device.current_stream() == b
            y = x * 2
        a.wait_stream(b)
        with device.stream(a):
            x.zero_()
        b.synchronize()
        assert y.cpu().tolist() == [20.0] * 3
        assert sim.report().races == []


def test_polling_makes_things_happen(device: Any) -> None:
    """Promise: a host that only asks does not ask forever."""
    x = torch.ones(2, device="sim") + 1
    event = device.Event()
    assert event.query()
    event.record()
    asked = 0
    while not event.query():
        asked += 1
    assert 1 <= asked < 10 and sim.report().total == 0
    assert x.inner.tolist() == [2.0, 2.0]


def _program(device: Any, seed: int) -> list[list[float]]:
    """Three streams without any wait: what they see depends on the order alone."""
    sim.configure(order="random", seed=seed, races=False)
    x = torch.zeros(1, device="sim")
    streams = [device.Stream() for _ in range(3)]
    seen = []
    for step in range(30):
        with device.stream(streams[step % 3]):
            x.mul_(1.5).add_(step)
            seen.append(x.clone())
    device.synchronize()
    return [value.inner.tolist() for value in seen]


def test_seeded_orders_are_repeatable(device: Any) -> None:
    """Promise: from one thread the same seed gives the same order, and other seeds other ones."""
    runs = [_program(device, seed) for seed in range(5)]
    assert [_program(device, seed) for seed in range(5)] == runs
    assert len({str(run) for run in runs}) == 5


def test_host_syncs_are_counted_by_place(device: Any) -> None:
    """Promise: each wait of the host is counted, with its thread, its reason and the line that caused it."""
    pinned = device.pinned_empty(16).view(torch.float32)
    x = torch.zeros(4, device="sim")
    x.copy_(pinned, non_blocking=True)
    pinned.copy_(x, non_blocking=True)
    torch.full((3,), 2.0, device="sim").sum()
    torch.arange(4, device="sim")
    assert sim.report().total == 0 and sim.report().launches == 6

    def lane() -> None:
        x.sum().item()
        bool(x.sum() > 0)

    thread = threading.Thread(target=lane, name="lane")
    thread.start()
    thread.join()
    for _ in range(3):
        x.copy_(torch.ones(4))
    x.cpu()
    torch.nonzero(x)
    x[x > 0]
    torch.tensor([1.0], device="sim")
    x.to("sim", torch.float64)
    torch.equal(x, x)
    device.synchronize()
    x.record_stream(device.Stream())
    device.current_stream().record_event().synchronize()
    counted = sim.report().host_syncs
    assert [(p.split(" at ")[0], n) for p, n in counted["lane"].items()] == [("aten._local_scalar_dense", 1)] * 2
    main = counted["MainThread"]
    assert all("sim/test_sim_streams.py:" in place for place in main)
    assert {place.split(" at ")[0]: count for place, count in main.items() if count > 1} == {
        "copy to the device of pageable memory": 3
    }
    assert sim.report().total == 2 + 3 + 7
    sim.reset_counts()
    assert sim.report().total == 0 and sim.report().launches == 0


def test_copies_of_page_locked_memory_are_late(device: Any) -> None:
    """Promise: they read and write the host's bytes when they run; a host that reads early gets NaN."""
    source = device.pinned_empty(64).view(torch.float32)
    target = torch.from_numpy(device.pinned_empty(64).numpy())[:16].view(torch.float32)
    source.fill_(1.0)
    x = torch.empty(4, device="sim").copy_(source[4:8], non_blocking=True)
    source.fill_(2.0)  # nothing has waited for the copy
    target.copy_(x, non_blocking=True)
    assert _nan(target)
    device.synchronize()
    assert target.tolist() == [2.0] * 4
    late = x.to("cpu", non_blocking=True)  # as on CUDA, into page-locked memory
    assert _nan(late)
    device.synchronize()
    assert late.tolist() == [2.0] * 4


def test_copies_of_pageable_memory_wait(device: Any) -> None:
    """Promise: `non_blocking` does nothing for memory that is not page-locked, as on CUDA, and the count says so."""
    source = torch.ones(4)
    x = source.to("sim", non_blocking=True)
    source.fill_(2.0)
    target = torch.zeros(4)
    target.copy_(x, non_blocking=True)
    assert target.tolist() == [1.0] * 4
    assert sum("pageable" in place for place in sim.report().host_syncs["MainThread"]) == 2


def test_page_locked_memory_can_be_forgotten(device: Any) -> None:
    """Promise: memory counts as page-locked as long as a view of it lives, and no longer."""
    from nestpipe.device.sim import pinned

    before = len(pinned._ranges)
    view = device.pinned_empty(100)[10:].numpy()
    assert pinned.pinned_range(torch.from_numpy(view)) is not None and len(pinned._ranges) == before + 1
    del view
    assert len(pinned._ranges) == before


def test_a_bad_index_is_told_at_the_next_wait(device: Any) -> None:
    """Promise: a fault on the device does not stop the host; the next sync names the operation and its place."""
    rows = torch.ones(4, 2, device="sim", requires_grad=True)
    index = torch.empty(3, dtype=torch.int64, device="sim")  # poison
    loss = rows.index_select(0, index).sum()
    loss.backward()
    for _ in range(2):  # and again: the device is lost
        with pytest.raises(sim.DeviceFault, match=r"index_select, issued at sim/test_sim_streams.py:\d+: .*range"):
            loss.item()
    sim.configure()
    assert torch.ones(2, device="sim").sum().item() == 2


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", ["repeat_interleave", "segment_reduce", "embedding", "gather", "index_add"])
def test_poisoned_integers_do_not_crash_the_process(device: Any, name: str, count: int) -> None:
    """Promise: lengths and indices that nobody has written fault cleanly, also where their sum wraps around."""
    ints = torch.empty(count, dtype=torch.int64, device="sim")
    rows = torch.ones(6, 2, device="sim")
    if name == "repeat_interleave":
        torch.repeat_interleave(ints, output_size=6)
    elif name == "segment_reduce":
        torch.segment_reduce(rows, "sum", lengths=ints, axis=0, unsafe=True)
    elif name == "embedding":
        torch.nn.functional.embedding(ints, rows)
    elif name == "gather":
        rows.gather(0, ints[:, None])
    else:
        rows.index_add_(0, ints, torch.ones(count, 2, device="sim"))
    with pytest.raises(sim.DeviceFault):
        device.synchronize()


def test_backward_runs_on_the_callers_stream(device: Any) -> None:
    """Promise: threads that train at the same time keep to their streams, and an error in backward is an ordinary one."""
    wrong: list[str] = []

    def lane(number: int) -> None:
        with device.stream(device.Stream()):
            w = torch.full((3,), float(number), device="sim").requires_grad_()
            for _ in range(20):
                w.grad = None
                (w * w).sum().backward()
            if w.grad.tolist() != [2.0 * number] * 3:
                wrong.append(f"lane {number}")

    threads = [threading.Thread(target=lane, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and sim.report().races == []

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad + torch.ones(3)  # on the host

    with pytest.raises(sim.DeviceMix):
        Bad.apply(torch.ones(3, device="sim").requires_grad_()).sum().backward()


def test_importing_is_cheap() -> None:
    """Promise: the package, and `disjoint`, can be imported and used without torch."""
    code = """
import sys
from nestpipe.device import sim
with sim.disjoint("rows of two micro-batches"):
    pass
assert "torch" not in sys.modules, "torch was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_random_orders_reach_far_between_streams(device: Any) -> None:
    """Promise: over a few seeds one stream is seen far ahead of another, and far behind."""
    ahead = set()
    for seed in range(20):
        sim.configure(order="random", seed=seed)
        a, b = device.Stream(), device.Stream()
        x = torch.zeros(1, device="sim")
        device.synchronize()
        for _ in range(20):
            for stream in (a, b):
                with device.stream(stream):
                    x + 1
        done = [stream.queue.done for stream in (a, b)]
        ahead.add((done[0] > done[1] + 10, done[1] > done[0] + 10))
    assert ahead >= {(True, False), (False, True)}


class _Doubled:
    """As a Triton kernel: kernel[grid](*arguments)."""

    __name__ = "doubled"

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(source: torch.Tensor, target: torch.Tensor, count: int, step: int = 1) -> None:
            assert type(source) is torch.Tensor
            for block in range(grid[0]):
                target[block * step : min(count, (block + 1) * step)] = 2 * source[block * step : (block + 1) * step]

        return run


def test_kernels_are_queued(device: Any) -> None:
    """Promise: a launched kernel runs in stream order on the memory behind its tensors, and its writes are looked at."""
    source, target = torch.arange(6.0, device="sim"), torch.empty(6, device="sim")
    sim.launch(_Doubled(), (3,), (source, target, 6), writes=(1,), step=2)
    assert _nan(target.inner)
    with device.stream(device.Stream()):
        target.sum()
    assert len(sim.report().races) == 1 and "doubled" in sim.report().races[0]
    assert target.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    with pytest.raises(sim.DeviceMix, match="doubled"):
        sim.launch(_Doubled(), (3,), (source, torch.ones(6), 6), writes=(1,))
