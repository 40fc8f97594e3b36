"""How far a process' resident memory rises while something runs."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
from collections.abc import Callable
from pathlib import Path

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def extra_bytes(run: Callable[[], object]) -> int:
    """The highest resident memory while `run` runs, minus that before it.

    Earlier work of the process, such as compiling kernels, may have been higher than anything that `run` does.  So free
    memory is given back and the kernel's high-water mark reset first, where the system can do that.
    """
    give_back()
    with contextlib.suppress(OSError):
        _RESET.write_text("5")  # 5: the mark of the resident size
    before = _highest()
    run()
    return _highest() - before


def give_back() -> None:
    """Returns memory that malloc holds and nobody uses to the system.  Nothing happens without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_bytes() -> int:
    """Memory that programs can still take without making others give theirs up.  Endless where nobody says."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return sys.maxsize


def _highest() -> int:
    with contextlib.suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
