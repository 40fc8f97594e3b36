"""The device module, what torch.cuda is for CUDA: `torch.get_device_module("sim")`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nestpipe.device.sim.machine import MACHINE
from nestpipe.device.sim.memory import ALLOCATOR
from nestpipe.device.sim.ops.seeds import SEEDS
from nestpipe.device.sim.pinned import pinned_empty
from nestpipe.device.sim.streams import (
    Event,
    Stream,
    current_stream,
    default_stream,
    set_stream,
    stream,
    synchronize,
)

__all__ = [
    "Event",
    "Stream",
    "current_stream",
    "default_stream",
    "pinned_empty",
    "set_stream",
    "stream",
    "synchronize",
]


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None: ...


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    index = device if isinstance(device, int) else torch.device(device).index
    if index not in (None, 0, -1):
        raise ValueError(f"there is one simulated device, sim:0; got index {index}")


@contextmanager
def device(device: Any) -> Iterator[None]:
    set_device(device)
    yield


def get_device_name(device: Any = None) -> str:
    return "simulated asynchronous device"


def _is_in_bad_fork() -> bool:
    return False


# Memory


def memory_allocated(device: Any = None) -> int:
    """Bytes that tensors hold now."""
    with MACHINE.lock:
        ALLOCATOR.take_back()
        return ALLOCATOR.allocated


def max_memory_allocated(device: Any = None) -> int:
    with MACHINE.lock:
        return ALLOCATOR.peak


def memory_reserved(device: Any = None) -> int:
    """Bytes taken from the host, in use or free."""
    with MACHINE.lock:
        ALLOCATOR.take_back()
        return ALLOCATOR.reserved


def reset_peak_memory_stats(device: Any = None) -> None:
    with MACHINE.lock:
        ALLOCATOR.take_back()
        ALLOCATOR.peak = ALLOCATOR.allocated


def empty_cache() -> None: ...


# Random numbers


def manual_seed(seed: int) -> None:
    with MACHINE.lock:
        SEEDS.restart(int(seed))


def manual_seed_all(seed: int) -> None:
    manual_seed(seed)


def initial_seed() -> int:
    return SEEDS.seed


def get_rng_state(device: Any = "sim") -> torch.Tensor:
    with MACHINE.lock:
        return SEEDS.state()


def set_rng_state(state: torch.Tensor, device: Any = "sim") -> None:
    with MACHINE.lock:
        SEEDS.set_state(state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]
