"""Triton kernels on the simulated device: interpreted (TRITON_INTERPRET=1), queued like any other operation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from nestpipe.device.sim.faults import DeviceMix
from nestpipe.device.sim.machine import MACHINE, Kernel
from nestpipe.device.sim.races import note
from nestpipe.device.sim.sites import site
from nestpipe.device.sim.tensor import SimTensor


def launch(kernel: Any, grid: Any, args: Sequence[Any], writes: Collection[int], options: dict[str, Any]) -> None:
    """kernel[grid](*args, **options) on the current stream."""
    name = getattr(kernel, "__name__", type(kernel).__name__)
    for value in args:
        if isinstance(value, torch.Tensor) and not isinstance(value, SimTensor):
            raise DeviceMix(f"kernel {name} got a tensor on {value.device}: move it to sim")
    inner = [value.inner if isinstance(value, SimTensor) else value for value in args]
    with MACHINE.lock:
        queue, place = MACHINE.current(), site()
        uses = [value.use(n in writes) for n, value in enumerate(args) if isinstance(value, SimTensor)]
        note(queue, name, place, uses)
        MACHINE.launches += 1
        MACHINE.put(queue, Kernel(name, place, lambda: kernel[grid](*inner, **options)))
