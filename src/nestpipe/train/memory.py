"""How much memory a worker uses, and for what."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from nestpipe.pipeline import TrainPipeline


def memory_of(pipeline: TrainPipeline) -> dict[str, int]:
    """Of this worker, now: its rows, and bytes of DRAM of tables (rows, state, index), of row buffers and of the process.

    `heap_used_bytes` is what the process has asked of malloc and not given back, `heap_free_bytes` what malloc holds for its next
    requests: that goes up and down by hundreds of MB, and only part of it is resident.  Rows and keys of tables lie in slabs
    outside that account; `heap_index_bytes` is the part of it that indexes of tables and ledger hold and that grows with them.
    """
    memory = pipeline.memory()
    indexes = memory.pop("heap_index_bytes")
    resident, heap = resident_bytes(), heap_bytes()
    if resident is not None:
        memory["resident_bytes"] = resident
    if heap is not None:
        memory["heap_used_bytes"], memory["heap_free_bytes"] = heap
        memory["heap_index_bytes"] = indexes
    return memory


def resident_bytes() -> int | None:
    """None where the system does not say (not Linux)."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


class _Mallinfo2(ctypes.Structure):
    """As glibc has it since 2.33."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def heap_bytes() -> tuple[int, int] | None:
    """Of all of malloc's arenas, and of blocks that have pages of their own: used and free.  None where there is no glibc."""
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return None
    ask.restype = _Mallinfo2
    found = ask()
    return int(found.uordblks + found.hblkhd), int(found.fordblks)


class HeapTrimmer:
    """Gives back to the system, from time to time, what malloc holds and nobody uses.

    Batches of many sizes leave holes in its arenas, so that resident memory would creep up over hours.  A return takes some
    milliseconds, but the next step asks for most of the pages again.  So it is done once soon after the start, then whenever
    resident memory has grown by a tenth over what the run settled at after the last return, and at least every few minutes,
    because the need may have fallen.
    """

    SECONDS = 10.0
    """Between two looks at resident memory.  A run has settled by the first one after a return."""
    GROWTH = 1.1
    LONGEST = 120.0

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; elsewhere nothing is done
        self._trimmed = self._looked = time.monotonic()
        self._settled: float | None = 0.0
        """Resident bytes at the first look after a return; None before it.  0: the first look finds growth."""

    def maybe_trim(self) -> None:
        """Called after every step."""
        now = time.monotonic()
        if self._trim is None or now - self._looked < self.SECONDS:
            return
        self._looked = now
        resident = resident_bytes()
        if self._settled is None:
            self._settled = resident
        if resident is None or resident > self.GROWTH * (self._settled or 0.0) or now - self._trimmed >= self.LONGEST:
            self._trim(ctypes.c_size_t(0))
            self._trimmed, self._settled = now, None
