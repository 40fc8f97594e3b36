"""Makes torch know the device: names PrivateUse1 "sim", registers its module and what makes its tensors."""

from __future__ import annotations

import sys

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from nestpipe.device.sim import module, tensor
from nestpipe.device.sim.backward import run_backward_on_the_caller
from nestpipe.device.sim.machine import MACHINE, Order
from nestpipe.device.sim.memory import ALLOCATOR
from nestpipe.device.sim.ops import autocast, factories
from nestpipe.device.sim.ops.dispatch import dispatch
from nestpipe.device.sim.races import FINDINGS
from nestpipe.device.sim.report import Report

_libraries: list[torch.library.Library] = []
"""What they register lasts as long as they do."""


def enable() -> None:
    if _libraries:
        return
    _setup_privateuseone_for_python_backend("sim", backend_module=sys.modules[module.__name__])
    _libraries.extend((torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL", autocast.KEY)))
    factories.register(_libraries[0])
    autocast.register(_libraries[0])
    _libraries[1].fallback(torch.library.fallthrough_kernel)
    tensor.dispatch = dispatch
    run_backward_on_the_caller()


def configure(order: Order, seed: int, races: bool, shuffle_atomics: bool) -> None:
    if order not in ("late", "random", "eager"):
        raise ValueError(f'order must be "late", "random" or "eager", not {order!r}')
    with MACHINE.lock:
        MACHINE.drain()
        MACHINE.reset(order, seed, races, shuffle_atomics)
        FINDINGS.reset()
        ALLOCATOR.reset()


def report() -> Report:
    with MACHINE.lock:
        syncs = {thread: dict(places) for thread, places in MACHINE.host_syncs.items()}
        return Report(list(FINDINGS.races), syncs, MACHINE.launches, dict(FINDINGS.annotations))


def reset_counts() -> None:
    with MACHINE.lock:
        MACHINE.host_syncs.clear()
        MACHINE.launches = 0
