"""Row buffers: an owner's rows of one batch, from a pool that grows as needed and keeps to a limit.

In steady state two buffers per group are in use: one for the batch in training and one for the next batch.  With
`early_retrieve` there is a third, because rows are retrieved while an earlier batch is still being written back, and with
`semi_async` a fourth, because they are retrieved a batch earlier.
"""

from __future__ import annotations

import threading
from collections import deque

from nestpipe.device.backend import Device, Mark
from nestpipe.errors import NestPipeError
from nestpipe.tables.group import TableGroup

ROOM = 1.25
"""A new buffer is larger than needed by this factor, so that batches of slightly different sizes fit."""
MEMORY = 64
"""A buffer that is twice as large as any of this many recent batches needed is freed."""


class BufferLimit(NestPipeError, MemoryError):
    """A batch needs more buffer memory than memory.buffer_limit allows."""

    exit_code = 2


class RowBuffer:
    """Values, state and summed gradients of a batch's owned rows in one group, one row per unique key.

    With replicas, `group_grads` are summed over the own shard group and `grads` over all; without, they are the same memory.
    """

    def __init__(self, pool: BufferPool, capacity: int) -> None:
        group = pool.group
        self._pool, self.group = pool, group
        self._values = pool.device.allocate((capacity, group.dim), group.dtype)
        self._state = pool.device.allocate((capacity, group.state_width), group.dtype)
        self._grads = pool.device.allocate((capacity, group.dim), group.dtype)
        alone = not pool.replicated
        self._group_grads = self._grads if alone else pool.device.allocate((capacity, group.dim), group.dtype)
        self.holders = 0
        self.releases: list[Mark] = []
        """What still ran on a device when a stage released this buffer."""
        self.use(0, 0)

    @property
    def capacity(self) -> int:
        return len(self._values)

    def use(self, rows: int, beside: int) -> None:
        self.values, self.state, self.grads = self._values[:rows], self._state[:rows], self._grads[:rows]
        self.group_grads = self.grads if self._group_grads is self._grads else self._group_grads[:rows]
        self.outgoing = self._values[: rows + beside]
        """What `embed` sends from: the values, and behind them those that `peek` copied."""

    def release(self) -> None:
        """One of the stages that read this buffer is done with it.  After the last one the buffer is reused."""
        self._pool.release(self)

    def abandon(self) -> None:
        """No stage will read this buffer any more."""
        self._pool.release(self, everyone=True)


class BufferPool:
    """The buffers of one group.  Safe from any lane."""

    def __init__(self, group: TableGroup, device: Device, replicated: bool = False) -> None:
        self.group, self.device, self.replicated = group, device, replicated
        self.row_bytes = ((3 if replicated else 2) * group.dim + group.state_width) * group.dtype.itemsize
        self._free: list[RowBuffer] = []
        self._lock = threading.Lock()
        self._recent: deque[int] = deque(maxlen=MEMORY)
        self.bytes = 0
        """Bytes of all buffers, in use or free."""
        self.peak = 0

    def take(self, rows: int, holders: int, beside: int = 0) -> RowBuffer:
        """A buffer of `rows` rows and `beside` more values, which returns to the pool after `holders` releases."""
        needed = rows + beside
        with self._lock:
            self._recent.append(needed)
            buffer = self._fitting(needed)
            if buffer is None:
                buffer = RowBuffer(self, int(needed * ROOM))
                self.bytes += buffer.capacity * self.row_bytes
                self.peak = max(self.peak, self.bytes)
            buffer.holders = holders
        for release in buffer.releases:
            self.device.after(release)
        buffer.releases.clear()
        buffer.use(rows, beside)
        return buffer

    def release(self, buffer: RowBuffer, everyone: bool = False) -> None:
        mark = self.device.mark()
        with self._lock:
            if everyone and buffer.holders == 0:
                return  # free already
            if mark is not None:
                buffer.releases.append(mark)
            buffer.holders -= buffer.holders if everyone else 1
            assert buffer.holders >= 0, "a buffer was released more often than it is held"
            if buffer.holders == 0:
                self._free.append(buffer)

    def _fitting(self, rows: int) -> RowBuffer | None:
        """A free buffer that fits, or None.

        Frees buffers that are too small, and those that are far too large by now.
        """
        largest = int(max(self._recent) * ROOM)
        kept: list[RowBuffer] = []
        for buffer in self._free:
            if buffer.capacity < rows or (buffer.capacity > 2 * largest and len(self._recent) == MEMORY):
                self.bytes -= buffer.capacity * self.row_bytes
            else:
                kept.append(buffer)
        self._free = kept
        return self._free.pop() if self._free else None


class Buffers:
    """The pools of all groups under one limit."""

    def __init__(
        self, groups: list[TableGroup], limit: int | None, device: Device, batches: int = 2, replicated: bool = False
    ) -> None:
        self.pools = [BufferPool(group, device, replicated) for group in groups]
        self.limit = limit
        self.batches = batches
        """Batches that hold buffers at the same time; the limit is for all of them."""

    def take(self, who: str, rows: list[int], holders: int, beside: list[int] | None = None) -> list[RowBuffer]:
        """One buffer per group.  `who` names the user in the error if they exceed the limit.

        `beside`: per group, values that `peek` will copy beside the rows.
        """
        more = beside or [0] * len(rows)
        if self.limit is not None:
            needed = self.batches * sum((n + m) * pool.row_bytes for n, m, pool in zip(rows, more, self.pools))
            if needed > self.limit:
                raise BufferLimit(
                    f"{who} needs {needed / 2**20:.1f} MB of row buffers ({self.batches} batches of {sum(rows):,} rows), but "
                    f"memory.buffer_limit is {self.limit / 2**20:.1f} MB: raise it, lower train.batch_size"
                    f"{', set pipeline.early_retrieve = false' if self.batches > 2 else ''} or use more workers"
                )
        return [pool.take(n, holders, m) for n, m, pool in zip(rows, more, self.pools)]

    @property
    def bytes(self) -> int:
        return sum(pool.bytes for pool in self.pools)

    @property
    def peak(self) -> int:
        return sum(pool.peak for pool in self.pools)
