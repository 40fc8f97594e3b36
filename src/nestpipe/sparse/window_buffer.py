"""A requester's memory for one group's rows of a batch: frozen values as they arrive, and the gradients that it sums.

With window dedup one block of memory serves the whole batch.  If that would be too large, rows are planned per
micro-batch, and each micro-batch has its own block from its `embed` to its `grad`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.device.backend import Array, Device
from nestpipe.keys.window import Window
from nestpipe.ops import rows
from nestpipe.tables.group import TableGroup


@dataclass(frozen=True)
class WindowRows:
    """Rows `begin`, `begin` + 1, ... of a window, and their gradients."""

    begin: int
    rows: Array
    grads: Array
    row_tensor: Tensor
    """The rows as the model sees them."""
    grad_tensor: Tensor


class WindowBuffer:
    """The memory of one window, by micro-batch.  `embed` opens it and `grad` closes it, both on the network lane."""

    def __init__(self, window: Window, group: TableGroup, device: Device) -> None:
        self._window, self._group, self._device = window, group, device
        self._open: dict[int, WindowRows] = {}
        self._closed_finite: Tensor | None = None
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
            finite = torch.isfinite(self._open.pop(micro).grad_tensor).all()
            self._closed_finite = finite if self._closed_finite is None else self._closed_finite & finite

    def finite(self) -> bool:
        """Whether all of this worker's own gradients are finite."""
        if self._whole is not None:
            return bool(torch.isfinite(self._whole.grad_tensor).all())
        return self._closed_finite is None or bool(self._closed_finite)

    def move(self, device: Device) -> None:
        """Rows that were looked up on the host go to `device`.  They have no gradients."""
        if self._device is not device and self._whole is not None:
            values = device.upload([self._whole.rows])[0]
            none = device.empty((0, self._group.dim), self._group.dtype)
            self._whole = WindowRows(0, values, none, device.tensor(values), device.tensor(none))

    def _make(self, begin: int, count: int) -> WindowRows:
        shape, dtype = (count, self._group.dim), self._group.dtype
        values, grads = (self._device.empty(shape, dtype, "network", "compute") for _ in range(2))
        rows.zero(grads)
        return WindowRows(begin, values, grads, self._device.tensor(values), self._device.tensor(grads))


def window_bytes(window: Window, group: TableGroup) -> int:
    """Bytes of one block of memory for the whole window."""
    return 2 * len(window) * group.dim * group.dtype.itemsize
