"""A requester's memory for one group's rows of a batch: frozen values as they arrive, and the gradients that it sums.

With window dedup one block of memory serves the whole batch.  If that would be too large, rows are planned per
micro-batch, and each micro-batch has its own block from its `embed` to its `grad`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.device.array_pool import ArrayPool
from nestpipe.keys.window import Window
from nestpipe.tables.group import TableGroup


@dataclass(frozen=True)
class WindowRows:
    """Rows `begin`, `begin` + 1, ... of a window, and their gradients."""

    begin: int
    rows: Tensor
    grads: Tensor


class WindowBuffer:
    """The memory of one window, by micro-batch.  `embed` opens it and `grad` closes it, both on the network lane."""

    def __init__(self, window: Window, group: TableGroup, arrays: ArrayPool) -> None:
        self._window, self._group, self._arrays = window, group, arrays
        self._open: dict[int, WindowRows] = {}
        self._closed_finite = True
        self._whole = None if window.by_micro else self._make(0, len(window))

    def open(self, micro: int) -> WindowRows:
        """Called before the rows of a micro-batch arrive."""
        if self._whole is not None:
            return self._whole
        begin = self._window.arrived(micro - 1) if micro else 0
        part = self._open[micro] = self._make(begin, self._window.arrived(micro) - begin)
        return part

    def of(self, micro: int) -> WindowRows:
        """The rows of a micro-batch, between its `embed` and its `grad`."""
        return self._open[micro] if self._whole is None else self._whole

    def close(self, micro: int) -> None:
        """Called after the gradients of a micro-batch have been sent."""
        if self._whole is None:
            self._closed_finite &= bool(torch.isfinite(self._open.pop(micro).grads).all())

    def finite(self) -> bool:
        """Whether all of this worker's own gradients are finite."""
        return self._closed_finite if self._whole is None else bool(torch.isfinite(self._whole.grads).all())

    def _make(self, begin: int, count: int) -> WindowRows:
        rows, grads = (self._arrays.take((count, self._group.dim), self._group.dtype) for _ in range(2))
        return WindowRows(begin, torch.from_numpy(rows), torch.from_numpy(grads).zero_())


def window_bytes(window: Window, group: TableGroup) -> int:
    """Bytes of one block of memory for the whole window."""
    return 2 * len(window) * group.dim * group.dtype.itemsize
