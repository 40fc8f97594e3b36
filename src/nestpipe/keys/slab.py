"""Memory for rows that grows without moving what is there.

A slab reserves address space for all the rows this machine could ever hold.  The operating system supplies pages as
rows are first written.  Kernels index one contiguous array, growth copies nothing, and unused rows cost nothing.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

_NORESERVE = 0x4000 if os.name == "posix" and os.uname().sysname == "Linux" else 0


def machine_bytes() -> int:
    """The memory of this machine: the most that any slab can ever use."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Slab:
    """`rows` is an array [max_rows, *row_shape], zero until written.  Pointers into it stay valid."""

    def __init__(self, dtype: np.typing.DTypeLike, row_shape: tuple[int, ...], max_rows: int | None = None) -> None:
        dtype = np.dtype(dtype)
        row_bytes = dtype.itemsize * int(np.prod(row_shape, dtype=np.int64))
        if max_rows is None:
            max_rows = machine_bytes() // max(row_bytes, 8)
        self.max_rows = max_rows
        size = max(row_bytes * max_rows, mmap.PAGESIZE)
        try:
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        except OSError as error:
            raise MemoryError(
                f"cannot reserve {size >> 20} MB of address space for a table ({error.strerror}): "
                "set vm.overcommit_memory to 0 or 1, or raise ulimit -v"
            ) from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        flat = np.frombuffer(self._memory, dtype=np.uint8, count=row_bytes * max_rows)
        self.rows: np.ndarray = flat.view(dtype).reshape((max_rows, *row_shape))

    def reserve(self, rows: int) -> None:
        """Raises MemoryError, with what to do, if `rows` rows can never fit.  Costs nothing otherwise."""
        if rows > self.max_rows:
            raise MemoryError(
                f"a table shard needs {rows} rows but this machine has room for {self.max_rows}: "
                "use more workers or a smaller dimension"
            )
