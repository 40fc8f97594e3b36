"""Memory for blocks: a fixed number of slots of one size, 64-byte aligned, taken once from the device."""

from __future__ import annotations

import numpy as np

from nestpipe.device.host import HostDevice

ALIGNMENT = 64


class Arena:
    """Slots for one block each.  What lies in a slot that was taken is whatever was there before."""

    def __init__(self, budget: int, block_bytes: int, device: HostDevice | None = None) -> None:
        self.slot_bytes = -(-block_bytes // ALIGNMENT) * ALIGNMENT
        self._block_bytes = block_bytes
        self.slots = budget // self.slot_bytes
        room = (device or HostDevice()).allocate((self.slots * self.slot_bytes + ALIGNMENT,), np.uint8)
        first = -room.ctypes.data % ALIGNMENT
        self._room = room[first : first + self.slots * self.slot_bytes]
        # The lowest slot first: memory that was never needed is never touched, so the system never gives it.
        self._free = list(range(self.slots - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used_bytes(self) -> int:
        return (self.slots - len(self._free)) * self.slot_bytes

    def take(self) -> int | None:
        """A slot, or None where there is none free."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        assert slot not in self._free[-8:], "a slot was given back twice"
        self._free.append(slot)

    def view(self, slot: int, dtype: np.typing.DTypeLike) -> np.ndarray:
        """The slot's memory as numbers."""
        start = slot * self.slot_bytes
        return self._room[start : start + self._block_bytes].view(dtype)
