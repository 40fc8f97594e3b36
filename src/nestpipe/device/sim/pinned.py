"""Host memory that counts as page-locked: only copies from and to it are asynchronous."""

from __future__ import annotations

import bisect
import weakref

import numpy as np
import torch

from nestpipe.device.sim.machine import MACHINE
from nestpipe.device.sim.memory import Memory

_ALIGNMENT = 64
_starts: list[int] = []
_ranges: list[Memory] = []


def pinned_empty(nbytes: int) -> torch.Tensor:
    """Host bytes, uninitialized.  Views of them, by torch or numpy, are page-locked as well, for as long as one lives."""
    backing = np.empty(max(nbytes, 1) + _ALIGNMENT, np.uint8)
    skip = -backing.ctypes.data % _ALIGNMENT
    array = backing[skip : skip + nbytes]
    tensor = torch.from_numpy(array)
    start = backing.ctypes.data
    with MACHINE.lock:
        place = bisect.bisect(_starts, start)
        _starts.insert(place, start)
        _ranges.insert(place, Memory(None, start, backing.nbytes))
    weakref.finalize(backing, _forget, start)
    return tensor


def pinned_range(tensor: torch.Tensor) -> Memory | None:
    """The page-locked memory that a host tensor lies in; None if it is pageable.  Callers hold the machine's lock."""
    start = tensor.data_ptr()
    place = bisect.bisect(_starts, start) - 1
    if place < 0 or not _ranges[place].holds(start):
        return None
    return _ranges[place]


def _forget(start: int) -> None:
    with MACHINE.lock:
        place = bisect.bisect_left(_starts, start)
        del _starts[place], _ranges[place]
