"""The host as a device: lanes are threads, arrays are numpy's, and what is done has finished."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe.device.array_pool import ArrayPool
from nestpipe.device.backend import Staged
from nestpipe.device.one_shot_event import OneShotEvent

_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class HostDevice:
    """Memory of the host."""

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self._arrays = ArrayPool()

    def lane(self, name: str) -> contextlib.AbstractContextManager[None]:
        return _NOTHING

    def thread_of(self, lane: str) -> str:
        return lane

    def begin_step(self) -> None:
        pass

    event = OneShotEvent

    compute_clock = staticmethod(time.thread_time)

    def mark(self) -> None:
        pass

    def after(self, mark: None) -> None:
        pass

    def allocate(self, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
        return np.empty(shape, dtype)

    def empty(self, shape: tuple[int, ...], dtype: np.typing.DTypeLike, *lanes: str) -> np.ndarray:
        return self._arrays.take(shape, dtype)

    def tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array)

    def upload(self, arrays: Sequence[np.ndarray], *lanes: str) -> list[np.ndarray]:
        return list(arrays)

    def stage(self, arrays: Sequence[np.ndarray]) -> Staged:
        return Staged(list(arrays))

    def send_up(self, staged: Staged, arrays: Sequence[np.ndarray]) -> None:
        pass

    def bring_down(self, arrays: Sequence[np.ndarray]) -> Staged:
        return Staged(list(arrays))

    def give_back(self, staged: Staged) -> None:
        pass

    def read(self, values: Sequence[float | Tensor]) -> list[float]:
        return [float(value) for value in values]

    def figures(self) -> dict[str, Any]:
        return {}

    def new_group(self, seconds: float, ranks: Sequence[int] | None = None) -> None:
        return None
