"""An accelerator as a device: lanes are streams, arrays are tensors, and what is done has been issued.

Written against what `torch.get_device_module` gives, which torch.cuda, torch.npu and the simulated device spell alike.
Verified on the simulated device, never on hardware.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nestpipe.device import doing
from nestpipe.device.backend import Staged
from nestpipe.device.one_shot_event import OneShotEvent
from nestpipe.device.staging import NUMPY_DTYPES, TORCH_DTYPES, Staging, places_of, views_of

HOST_LANES = ("data", "route")
"""Lanes whose work is the host's own: they have no stream."""
STREAM_LANES = ("copy", "storage", "network", "replica", "dense", "update", "writeback")
CALLERS_LANE = "compute"
"""The stream on which the caller is when it calls `progress`."""
SLACK = 60.0
"""Seconds that a backend's own watchdog waits longer than ours."""
BACKENDS = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl"}


class StreamEvent(OneShotEvent):
    """Set when an action has been issued.  Who waits lets its stream wait for the action itself."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: Accelerator) -> None:
        super().__init__()
        self._device = device
        self._event: Any = None

    def set(self) -> None:
        if not self._is_set:
            self._event = self._device.mark()
            super().set()

    def wait(self) -> None:
        super().wait()
        self._device.after(self._event)


class Accelerator:
    """Memory and streams of one device."""

    def __init__(self, device: torch.device) -> None:
        self.module: Any = torch.get_device_module(device)
        index = device.index if device.index is not None else self.module.current_device()
        self.torch_device = torch.device(device.type, index)
        self._streams: dict[str, Any] = {lane: self.module.Stream(self.torch_device) for lane in STREAM_LANES}
        self._on_host = threading.local()
        self._staging = Staging(self._pinned)
        self._waits: dict[str, list[float]] = {}
        """Of the host for the device, by stage: how often, and seconds."""

    # Lanes and events

    @contextlib.contextmanager
    def lane(self, name: str) -> Iterator[None]:
        if name in HOST_LANES:
            self._on_host.is_so = True
            yield
        else:
            with self.module.stream(self._streams[name]):
                yield

    def thread_of(self, lane: str) -> str:
        """Concurrent communicators deadlock if two workers begin with different ones: one thread issues all collectives."""
        return "network" if lane in ("dense", "replica") else lane

    def begin_step(self) -> None:
        self._streams[CALLERS_LANE] = self.module.current_stream(self.torch_device)

    def event(self) -> StreamEvent:
        return StreamEvent(self)

    def compute_clock(self) -> float:
        return math.nan  # the host issues work and does not see how long it takes

    def mark(self) -> Any:
        stream = self._stream()
        return None if stream is None else stream.record_event()

    def after(self, mark: Any) -> None:
        stream = self._stream()
        if mark is not None and stream is not None:
            stream.wait_event(mark)

    def _stream(self) -> Any:
        """This thread's stream; None on a thread of the host's own lanes."""
        return None if getattr(self._on_host, "is_so", False) else self.module.current_stream(self.torch_device)

    # Memory

    def allocate(self, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> Tensor:
        return self.empty(shape, dtype, *STREAM_LANES, CALLERS_LANE)

    def empty(self, shape: tuple[int, ...], dtype: np.typing.DTypeLike, *lanes: str) -> Tensor:
        made = torch.empty(shape, dtype=TORCH_DTYPES[np.dtype(dtype)], device=self.torch_device)
        return self._shared(made, lanes)

    def tensor(self, array: Tensor) -> Tensor:
        return array

    def upload(self, arrays: Sequence[np.ndarray], *lanes: str) -> list[Tensor]:
        """One copy for all of them."""
        shapes = [(array.shape, array.dtype) for array in arrays]
        places, size = places_of(shapes)
        if not size:
            return [torch.empty(s, dtype=TORCH_DTYPES[d], device=self.torch_device) for s, d in shapes]
        block = self._staging.take(size)
        for array, target in zip(arrays, views_of(block.memory, shapes)):
            target[...] = array
        there = self.empty((size,), np.uint8, *lanes)
        there.copy_(block.memory[:size], non_blocking=True)
        self._staging.give_back(block, self.mark())
        return [
            there[at : at + n].view(TORCH_DTYPES[dtype]).view(shape) for (at, n), (shape, dtype) in zip(places, shapes)
        ]

    def stage(self, arrays: Sequence[Tensor]) -> Staged:
        shapes = [(tuple(array.shape), NUMPY_DTYPES[array.dtype]) for array in arrays]
        block = self._staging.take(places_of(shapes)[1])
        return Staged(views_of(block.memory, shapes), block)

    def send_up(self, staged: Staged, arrays: Sequence[Tensor]) -> None:
        for here, there in zip(staged.arrays, arrays):
            if here.size:
                there.copy_(torch.from_numpy(here), non_blocking=True)
        self._staging.give_back(staged.block, self.mark())

    def bring_down(self, arrays: Sequence[Tensor]) -> Staged:
        staged = self.stage(arrays)
        for here, there in zip(staged.arrays, arrays):
            if here.size:
                torch.from_numpy(here).copy_(there, non_blocking=True)
        began = time.perf_counter()
        self.mark().synchronize()
        wait = self._waits.setdefault(doing.stage(), [0, 0.0])
        wait[0] += 1
        wait[1] += time.perf_counter() - began
        return staged

    def give_back(self, staged: Staged) -> None:
        self._staging.give_back(staged.block)

    def read(self, values: Sequence[float | Tensor]) -> list[float]:
        found = [value for value in values if isinstance(value, Tensor)]
        if not found:
            return [float(value) for value in values]
        packed = torch.stack([value.detach().double().reshape(()) for value in found])
        staged = self.bring_down([packed])
        numbers = iter(staged.arrays[0].tolist())
        self.give_back(staged)
        return [next(numbers) if isinstance(value, Tensor) else float(value) for value in values]

    def figures(self) -> dict[str, Any]:
        return {
            "name": str(self.torch_device),
            "bytes": {
                "now": self.module.memory_allocated(self.torch_device),
                "peak": self.module.max_memory_allocated(self.torch_device),
            },
            "pinned_bytes": self._staging.bytes,
            "host_waits": {
                stage: {"count": int(count), "seconds": seconds} for stage, (count, seconds) in self._waits.items()
            },
        }

    def _shared(self, tensor: Tensor, lanes: Sequence[str]) -> Tensor:
        """Memory that other lanes use is free only when they have passed the point at which it was dropped."""
        for lane in lanes:
            stream = self._streams.get(lane)
            if stream is not None:
                tensor.record_stream(stream)
        return tensor

    def _pinned(self, nbytes: int) -> Tensor:
        make = getattr(self.module, "pinned_empty", None)  # of the simulated device
        return make(nbytes) if make is not None else torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    # Wire

    def new_group(self, seconds: float, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
        timeout = timedelta(
            seconds=2 * seconds + SLACK
        )  # `CollectiveWatch` is to notice first: it knows stage and batch
        some = {} if ranks is None else {"ranks": list(ranks), "use_local_synchronization": True}
        if self.torch_device.type in BACKENDS:
            return dist.new_group(backend=BACKENDS[self.torch_device.type], timeout=timeout, **some)
        from nestpipe.device.sim import new_wire_group

        return new_wire_group(dist.new_group(backend="gloo", timeout=timeout, **some))
