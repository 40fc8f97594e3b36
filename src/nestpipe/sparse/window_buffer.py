"""A requester's memory for one group's rows of a batch: frozen values as they arrive, and the gradients it sums up itself.

With window dedup there is one room for the whole batch.  Where that would be too large, rows are planned for each micro-batch by
itself, and each has a room of its own, from its `embed` to its `grad`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.device.array_pool import ArrayPool
from nestpipe.keys.window import Window
from nestpipe.tables.group import TableGroup


@dataclass(frozen=True)
class Room:
    """Rows `begin`, `begin` + 1, ... of a window and their gradients."""

    begin: int
    rows: Tensor
    grads: Tensor


class WindowBuffer:
    """The rooms of one window, by micro-batch.  `embed` opens them and `grad` closes them, both on the network lane."""

    def __init__(self, window: Window, group: TableGroup, blocks: ArrayPool) -> None:
        self._window, self._group, self._blocks = window, group, blocks
        self._rooms: dict[int, Room] = {}
        self._closed_finite = True
        self._whole = None if window.by_micro else self._make(0, len(window))

    def open(self, micro: int) -> Room:
        """Before rows of a micro-batch arrive."""
        if self._whole is not None:
            return self._whole
        begin = self._window.arrived(micro - 1) if micro else 0
        room = self._rooms[micro] = self._make(begin, self._window.arrived(micro) - begin)
        return room

    def of(self, micro: int) -> Room:
        """Between its `embed` and its `grad`."""
        return self._rooms[micro] if self._whole is None else self._whole

    def close(self, micro: int) -> None:
        """After the gradients of a micro-batch have been sent."""
        if self._whole is None:
            self._closed_finite &= bool(torch.isfinite(self._rooms.pop(micro).grads).all())

    def finite(self) -> bool:
        """Whether this worker's own gradients are."""
        return self._closed_finite if self._whole is None else bool(torch.isfinite(self._whole.grads).all())

    def _make(self, begin: int, count: int) -> Room:
        rows, grads = (self._blocks.take((count, self._group.dim), self._group.dtype) for _ in range(2))
        return Room(begin, torch.from_numpy(rows), torch.from_numpy(grads).zero_())


def window_bytes(window: Window, group: TableGroup) -> int:
    """Of one room for the whole window."""
    return 2 * len(window) * group.dim * group.dtype.itemsize
