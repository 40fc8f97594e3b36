"""Device memory, handed out and taken back as CUDA's caching allocator does.

A block belongs to the stream that was current when it was taken.  When Python drops the last tensor on it, the same
stream may have it again at once: whatever that stream does next comes later anyway.  Other streams that still use the
block are safe only if `record_stream` named them; then the block waits until they have passed the point that they had
reached.  Bytes are counted as CUDA does, in multiples of 512, from taking to dropping.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from nestpipe.device.sim.machine import MACHINE, Clock, Kernel, Queue, merge
from nestpipe.device.sim.poison import poison_bytes
from nestpipe.device.sim.races import Access, Use, note
from nestpipe.device.sim.sites import Site

_LEAST = 512
"""Bytes; sizes are rounded up to a power of two, so that memory changes hands often."""


class Memory:
    """A range of bytes, and who used it."""

    __slots__ = ("epoch", "log", "raw", "size", "start", "touched")

    def __init__(self, raw: torch.Tensor | None, start: int, size: int) -> None:
        self.raw = raw
        self.start = start
        self.size = size
        self.log: list[Access] = []
        self.touched: dict[Queue, int] = {}
        """The last item of each stream that uses these bytes."""
        self.epoch = MACHINE.epoch

    def holds(self, address: int) -> bool:
        return self.start <= address < self.start + self.size

    def refresh(self) -> None:
        """What was before the last reset is over."""
        if self.epoch != MACHINE.epoch:
            self.epoch = MACHINE.epoch
            self.log.clear()
            self.touched.clear()

    def idle(self) -> bool:
        """Whether nothing that is queued uses these bytes."""
        self.refresh()
        return all(queue.done >= at for queue, at in self.touched.items())


Point = tuple[Queue, int, Clock]
"""A place in a stream, and what comes before it."""


class Block:
    """Memory in the hands of one or more tensors; goes back to its stream with the last of them."""

    __slots__ = ("bytes", "memory", "owner", "used_on")

    def __init__(self, memory: Memory, owner: Queue, bytes: int) -> None:
        self.memory = memory
        self.owner = owner
        self.bytes = bytes
        self.used_on: set[int] = set()

    def __del__(self) -> None:
        """In any thread at any time, so without the lock: notes where the named streams are, and leaves the rest."""
        if ALLOCATOR is None:  # Python is shutting down
            return
        points = []
        for number in self.used_on:
            queue = MACHINE.queues.get(number)
            if queue is not None:
                points.append((queue, queue.issued, {**queue.clock, number: queue.issued}))
        ALLOCATOR.dropped.append((self.memory, self.owner, self.bytes, points))


class Allocator:
    """Callers hold the machine's lock."""

    def __init__(self) -> None:
        self.dropped: deque[tuple[Memory, Queue, int, list[Point]]] = deque()
        self._free: dict[tuple[int, int], list[tuple[Memory, list[Point]]]] = {}
        self.allocated = self.peak = self.reserved = 0

    def reset(self) -> None:
        """Free memory goes back to the host, and the peak starts anew.  Blocks in use stay."""
        self.take_back()
        self.reserved -= sum(memory.size for free in self._free.values() for memory, _ in free)
        self._free.clear()
        self.peak = self.allocated

    def take(self, nbytes: int, queue: Queue, name: str, site: Site) -> Block:
        """Poisoned memory of a stream.  Memory that was used before is poisoned in stream order, unless nobody uses it."""
        self.take_back()
        size = max(_LEAST, 1 << (nbytes - 1).bit_length()) if nbytes else _LEAST
        memory = self._reuse(size, queue)
        if memory is None:
            memory = _fresh(size)
            self.reserved += size
        elif memory.idle():
            poison_bytes(_raw(memory))
        else:
            raw = _raw(memory)
            note(queue, f"taking memory for {name}", site, [Use(memory, memory.start, memory.start + size, True)])
            MACHINE.put(queue, Kernel("poison", site, lambda: poison_bytes(raw)))
        counted = -(-nbytes // 512) * 512
        self.allocated += counted
        self.peak = max(self.peak, self.allocated)
        return Block(memory, queue, counted)

    def take_back(self) -> None:
        """Sorts in what was dropped since."""
        while self.dropped:
            memory, owner, nbytes, points = self.dropped.popleft()
            self.allocated -= nbytes
            if MACHINE.queues.get(owner.number) is not owner:  # of a stream from before the last reset
                self.reserved -= memory.size
                continue
            self._free.setdefault((owner.number, memory.size), []).append((memory, points))

    def _reuse(self, size: int, queue: Queue) -> Memory | None:
        """The memory that this stream gave back last and that no named stream still uses."""
        free = self._free.get((queue.number, size), [])
        for place in range(len(free) - 1, -1, -1):
            memory, points = free[place]
            if all(other.done >= at for other, at, _ in points):
                del free[place]
                for _, _, clock in points:
                    merge(queue.clock, clock)  # the allocator has seen that they are over
                return memory
        return None


def _fresh(size: int) -> Memory:
    with torch.inference_mode(False):  # an inference tensor could not be written later
        raw = torch.empty(size, dtype=torch.uint8)
        poison_bytes(raw)
    return Memory(raw, raw.data_ptr(), size)


def _raw(memory: Memory) -> torch.Tensor:
    assert memory.raw is not None, "page-locked memory is not the allocator's"
    return memory.raw


def strided(block: Block, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The host tensor behind a new device tensor."""
    raw = _raw(block.memory)
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return raw.view(dtype).as_strided(shape, stride)
    return raw.view(dtype).as_strided(shape, stride)


def span_of(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements lie between the first and the last one of a view, both included."""
    last = 0
    for count, step in zip(shape, stride):
        if count == 0:
            return 0
        last += (count - 1) * step
    return last + 1


def use_of(tensor: torch.Tensor, memory: Memory, writes: bool) -> Use:
    """The bytes of a host tensor in `memory`."""
    shape, stride, item, start = tensor.shape, tensor.stride(), tensor.element_size(), tensor.data_ptr()
    high = start + span_of(shape, stride) * item
    if len(shape) == 2 and stride[1] == 1 and stride[0] > shape[1] and shape[0] > 1:
        return Use(memory, start, high, writes, stride[0] * item, shape[1] * item)
    return Use(memory, start, high, writes)


ALLOCATOR = Allocator()
