"""Random programs on random streams, with the right events, against the same programs on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.device import sim

SIDE, VALUES, STREAMS = 4, 4, 3

NEW = {
    "add": lambda a, b: a + b,
    "product": lambda a, b: a @ b,
    "scaled": lambda a, b: a * 0.5 + 1,
    "rows": lambda a, b: a.index_select(0, (b[0].abs() * 3).long() % SIDE),
    "cat": lambda a, b: torch.cat([a[:2], b.t()[1:3]]),
    "norm": lambda a, b: torch.nn.functional.layer_norm(a, (SIDE,), b[0], b[1]),
    "sorted": lambda a, b: torch.sort(a + b, dim=1, stable=True).values,
    "sums": lambda a, b: a.sum(0, keepdim=True).expand(SIDE, SIDE) / (b.abs() + 1),
    "grad": lambda a, b: _grad(a, b),
    "half": lambda a, b: a.bfloat16().float() - b.double().float(),
}
IN_PLACE = {
    "add_": lambda a, b: a.add_(b),
    "mul_": lambda a, b: a.mul_(0.75),
    "part_": lambda a, b: a[1:3].sub_(b[:2]),
    "column_": lambda a, b: a[:, 1].copy_(b[2]),
    "index_add_": lambda a, b: a.index_add_(0, (b[0].abs() * 3).long() % SIDE, b),
    "zero_": lambda a, b: a.zero_(),
    "where_": lambda a, b: a.masked_fill_(b > 0, 0.25),
}


def _grad(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x = a.detach().requires_grad_()
    torch.nn.functional.silu(x @ b).logsumexp(1).sum().backward()
    assert x.grad is not None
    return x.grad


@dataclass(frozen=True)
class Step:
    """`name` of an operation on the values at a and b; a new value goes to place `to`, on stream `on`."""

    name: str
    a: int
    b: int
    to: int
    on: int


places = st.integers(0, VALUES - 1)
steps = st.builds(
    Step, st.sampled_from([*NEW, *IN_PLACE, "down and up"]), places, places, places, st.integers(0, STREAMS - 1)
)


@dataclass
class Value:
    """A tensor with the events of its last write and of the reads since."""

    tensor: torch.Tensor
    written: Any
    read: list[Any] = field(default_factory=list)


class OnDevice:
    """Runs steps on streams, with the events that they need and none more."""

    def __init__(self, device: Any, values: list[torch.Tensor]) -> None:
        self.device = device
        self.streams = [device.Stream() for _ in range(STREAMS)]
        self.values = [Value(value.to("sim"), device.current_stream().record_event()) for value in values]

    def run(self, step: Step) -> None:
        stream = self.streams[step.on]
        a, b = self.values[step.a], self.values[step.b]
        in_place = step.name in IN_PLACE
        for event in (a.written, b.written, *(a.read if in_place else ())):
            stream.wait_event(event)
        with self.device.stream(stream):
            for value in (a, b):
                value.tensor.record_stream(stream)
            if in_place:
                IN_PLACE[step.name](a.tensor, b.tensor)
                b.read.append(stream.record_event())
                a.written, a.read = stream.record_event(), []
                return
            new = self._around(a.tensor) if step.name == "down and up" else NEW[step.name](a.tensor, b.tensor)
            done = stream.record_event()
        a.read.append(done)
        b.read.append(done)
        self.values[step.to] = Value(new, done)

    def _around(self, value: torch.Tensor) -> torch.Tensor:
        """Down to page-locked memory and up again, in stream order."""
        host = self.device.pinned_empty(SIDE * SIDE * 4).view(torch.float32).view(SIDE, SIDE)
        host.copy_(value, non_blocking=True)
        return torch.empty(SIDE, SIDE, device="sim").copy_(host, non_blocking=True)

    def results(self) -> list[torch.Tensor]:
        self.device.synchronize()
        return [value.tensor.cpu() for value in self.values]


def _on_cpu(values: list[torch.Tensor], program: list[Step]) -> list[torch.Tensor]:
    values = [value.clone() for value in values]
    for step in program:
        a, b = values[step.a], values[step.b]
        if step.name in IN_PLACE:
            IN_PLACE[step.name](a, b)
        elif step.name == "down and up":
            values[step.to] = a.clone()
        else:
            values[step.to] = NEW[step.name](a, b)
    return values


@pytest.mark.slow
@settings(max_examples=25)
@given(program=st.lists(steps, min_size=10, max_size=40), seed=st.integers(0, 1000))
def test_random_programs_give_the_bits_of_the_cpu(program: list[Step], seed: int) -> None:
    """Promise: with the right events every order gives the CPU's bits, and the race detector is silent."""
    sim.enable()
    program = [step for step in program if step.name not in IN_PLACE or step.a != step.b]
    made = torch.Generator().manual_seed(seed)
    values = [torch.randn(SIDE, SIDE, generator=made) for _ in range(VALUES)]
    want = _on_cpu(values, program)
    for order in ("late", "random"):
        sim.configure(order=order, seed=seed)
        run = OnDevice(torch.get_device_module("sim"), values)
        for step in program:
            run.run(step)
        for got, expected in zip(run.results(), want):
            assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert sim.report().races == []
    sim.configure()
