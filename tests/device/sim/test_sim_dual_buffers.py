"""Dual buffers in small: rows go up, are trained and go down on three streams.  Whatever guard is removed, it is noticed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from nestpipe.device import sim

ROWS, WIDTH, BATCH, SAMPLES, STEPS = 24, 4, 8, 20, 8
GUARDS = (
    "compute waits for rows",
    "writeback waits for the update",
    "staging waits for its copy up",
    "store waits for the copy down",
    "rows recorded on compute",
    "rows recorded on writeback",
    "index recorded on compute",
)
ORDERS = (("late", 0), *(("random", seed) for seed in range(6)))


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys of each batch, each once, and the places of a batch's samples among them."""
    made = torch.Generator().manual_seed(5)
    return [
        (torch.randperm(ROWS, generator=made)[:BATCH], torch.randint(BATCH, (SAMPLES,), generator=made).int())
        for _ in range(STEPS)
    ]


def _step(rows: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> None:
    """A step of training on rows and a dense weight, in place."""
    samples = rows.index_select(0, index).requires_grad_()
    leaf = weight.detach().requires_grad_()
    torch.nn.functional.softplus(samples @ leaf).mean().backward()
    weight.sub_(leaf.grad, alpha=0.1)
    rows.index_add_(0, index, samples.grad, alpha=-0.5)


def _start() -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(6)
    return torch.randn(ROWS, WIDTH, generator=made), torch.randn(WIDTH, generator=made)


def _serial() -> tuple[torch.Tensor, torch.Tensor]:
    store, weight = _start()
    for keys, index in _batches():
        rows = store[keys]
        _step(rows, index, weight)
        store[keys] = rows
    return store, weight


@dataclass
class Flight:
    """A batch under way."""

    keys: torch.Tensor
    rows: Any = None
    index: Any = None
    up: Any = None
    updated: Any = None
    down: Any = None


class Pipe:
    """Batch t + 1 goes up and batch t - 1 goes down while t computes.  Every device tensor has the same size, to be reused."""

    def __init__(self, device: Any, without: str) -> None:
        self.device, self.without = device, without
        self.copy, self.compute, self.back = device.Stream(), device.Stream(), device.Stream()
        self.store, weight = _start()
        self.weight = weight.to("sim")
        device.synchronize()
        self.batches = _batches()
        self.flights: dict[int, Flight] = {}
        self.rows_up = self._pinned(BATCH, WIDTH)
        self.index_up = self._pinned(SAMPLES).view(torch.int32)
        self.copied_up: Any = None
        self.rows_down = [self._pinned(BATCH, WIDTH) for _ in range(2)]

    def _pinned(self, *shape: int) -> torch.Tensor:
        return self.device.pinned_empty(4 * math.prod(shape)).view(torch.float32).view(shape)

    def _has(self, guard: str) -> bool:
        return guard != self.without

    def send_index(self, t: int) -> None:
        keys, index = self.batches[t]
        flight = self.flights[t] = Flight(keys)
        if self.copied_up is not None and self._has("staging waits for its copy up"):
            self.copied_up.synchronize()
        self.index_up.copy_(index)
        with self.device.stream(self.copy):
            flight.index = torch.empty(SAMPLES, dtype=torch.int32, device="sim").copy_(self.index_up, non_blocking=True)

    def send_rows(self, t: int) -> None:
        flight = self.flights[t]
        self.rows_up.copy_(self.store[flight.keys])
        with self.device.stream(self.copy):
            flight.rows = torch.empty(BATCH, WIDTH, device="sim").copy_(self.rows_up, non_blocking=True)
            flight.up = self.copied_up = self.copy.record_event()

    def train(self, t: int) -> None:
        """Rows that the batch before has as well come from its buffer."""
        flight = self.flights[t]
        if self._has("compute waits for rows"):
            self.compute.wait_event(flight.up)
        with self.device.stream(self.compute):
            if self._has("rows recorded on compute"):
                flight.rows.record_stream(self.compute)
            if self._has("index recorded on compute"):
                flight.index.record_stream(self.compute)
            if t > 0:
                before = self.flights[t - 1]
                for place, key in enumerate(flight.keys.tolist()):
                    for there in (before.keys == key).nonzero().flatten().tolist():
                        flight.rows[place].copy_(before.rows[there])
            _step(flight.rows, flight.index, self.weight)
            flight.updated = self.compute.record_event()
        flight.index = None
        if t > 0:
            self.flights[t - 1].rows = None

    def writeback(self, t: int) -> None:
        flight = self.flights[t]
        if self._has("writeback waits for the update"):
            self.back.wait_event(flight.updated)
        with self.device.stream(self.back):
            if self._has("rows recorded on writeback"):
                flight.rows.record_stream(self.back)
            self.rows_down[t % 2].copy_(flight.rows, non_blocking=True)
            flight.down = self.back.record_event()

    def store_rows(self, t: int) -> None:
        if t < 0:
            return
        flight = self.flights.pop(t)
        if self._has("store waits for the copy down"):
            flight.down.synchronize()
        self.store[flight.keys] = self.rows_down[t % 2]

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.send_index(0)
        self.send_rows(0)
        for t in range(STEPS):
            self.train(t)
            self.writeback(t)
            if t + 1 < STEPS:
                self.send_index(t + 1)
            self.store_rows(t - 1)
            if t + 1 < STEPS:
                self.send_rows(t + 1)
        self.store_rows(STEPS - 1)
        with self.device.stream(self.compute):
            return self.store, self.weight.cpu()


def _same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(g, w) for g, w in zip(got, want))


def _noticed(device: Any, without: str, order: str, seed: int) -> list[str]:
    """Who notices: a wrong number, a fault of the device, the race detector."""
    sim.configure(order=order, seed=seed)
    found = []
    try:
        if not _same(Pipe(device, without).run(), _serial()):
            found.append("numbers")
    except sim.DeviceFault:
        found.append("fault")
    return found + (["race"] if sim.report().races else [])


@pytest.mark.slow
def test_the_pipe_is_exact_in_every_order(device: Any) -> None:
    """Promise: with all guards every order gives the bits of the serial program, without a race; no sync but two a step."""
    for order, seed in (*ORDERS, ("eager", 0)):
        assert _noticed(device, "", order, seed) == []
    assert sim.report().total <= 2 * STEPS + 2  # and two to begin, with pageable memory


@pytest.mark.parametrize("guard", GUARDS)
def test_a_removed_guard_is_noticed(device: Any, guard: str) -> None:
    """Promise: each removed wait, record_stream or wait for staging shows in late order or in one of a few seeds."""
    found = {f"{order} {seed}": _noticed(device, guard, order, seed) for order, seed in ORDERS}
    print(f"{guard:32s}", {order: who for order, who in found.items() if who})
    assert any(found.values()), guard
