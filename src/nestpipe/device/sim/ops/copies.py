"""Copies between host and device, and on the device.

Only copies of page-locked memory with `non_blocking` are late: one to the device reads the host's bytes when it runs, one
to the host poisons its target at once and writes it when it runs.  All others wait, as CUDA's do, and are counted.
"""

from __future__ import annotations

from typing import Any

import torch

from nestpipe.device.sim.machine import MACHINE, Kernel
from nestpipe.device.sim.memory import Memory, span_of, use_of
from nestpipe.device.sim.pinned import pinned_empty, pinned_range
from nestpipe.device.sim.poison import poison_values
from nestpipe.device.sim.races import note
from nestpipe.device.sim.sites import site
from nestpipe.device.sim.tensor import SimTensor, new_tensor


def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """target.copy_(source) on the current stream; one of them at least is a device tensor."""
    up, down = not isinstance(source, SimTensor), not isinstance(target, SimTensor)
    name = "copy to the device" if up else "copy to the host" if down else "copy"
    with MACHINE.lock:
        host = source if up else target if down else None
        pinned = pinned_range(host) if host is not None else None
        if down and non_blocking and pinned is not None:
            with torch.no_grad():
                poison_values(target)
        _issue(name, target, source, pinned)
        if host is None or not host.numel():
            return target
        if pinned is None and non_blocking:
            MACHINE.wait_for(MACHINE.current(), f"{name} of pageable memory (non_blocking has no effect)")
        elif not non_blocking:
            MACHINE.wait_for(MACHINE.current(), name if pinned is not None or down else f"{name} of pageable memory")
    return target


def _issue(name: str, target: torch.Tensor, source: torch.Tensor, pinned: Memory | None) -> None:
    queue, place = MACHINE.current(), site()
    uses = [t.use(t is target) for t in (target, source) if isinstance(t, SimTensor)]
    if pinned is not None:
        host = target if not isinstance(target, SimTensor) else source
        uses.append(use_of(host, pinned, host is target))
    to = target.inner if isinstance(target, SimTensor) else target.detach()
    values = source.inner if isinstance(source, SimTensor) else source.detach()
    note(queue, name, place, uses)
    MACHINE.launches += 1
    MACHINE.put(queue, Kernel(name, place, lambda: to.copy_(values)))


def to_copy(
    source: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = torch.preserve_format,
) -> torch.Tensor:
    """Tensor.to() of a device tensor: a new tensor, here or on the host.

    As on CUDA, a non-blocking copy to the host goes to page-locked memory, and is not there yet when this returns.
    """
    assert isinstance(source, SimTensor), "copies of host tensors to the device arrive as copy_"
    shape = torch.empty_like(source.like_on_meta(), dtype=dtype, memory_format=memory_format or torch.preserve_format)
    target = torch.device(device) if device is not None else source.device
    if target.type == "meta":
        return shape
    if target.type == "sim":
        with MACHINE.lock:
            made: torch.Tensor = new_tensor(MACHINE.current(), shape.shape, shape.stride(), shape.dtype, "copy", site())
    elif non_blocking:
        raw = pinned_empty(span_of(tuple(shape.shape), shape.stride()) * shape.element_size())
        made = raw.view(shape.dtype).as_strided(shape.shape, shape.stride())
    else:
        made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
    return copy(made, source, non_blocking)
