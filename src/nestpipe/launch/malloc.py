"""Large tensors that reuse their memory from step to step.

glibc gives every block of more than some megabytes pages of its own and returns them when the block is freed.  A step on long
histories allocates many such blocks, so that each step asks for the same pages anew, and the kernel zeroes them: page faults
that can take a third of the step.  With higher thresholds the blocks come from the heap and stay there.

What a run no longer needs still goes back to the system: `train.memory.HeapTrimmer` trims the heap whatever the thresholds are.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Mapping

from nestpipe.errors import NestPipeError

log = logging.getLogger("nestpipe.launch")

SWITCH = "NESTPIPE_MALLOC"
SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")
"""Variables by which users set the same in glibc."""
OTHERS = ("jemalloc", "tcmalloc", "mimalloc", "hoard", "rpmalloc", "snmalloc")
"""What LD_PRELOAD names where another malloc is in use."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_LARGEST_BLOCK = 1 << 30
_NEVER = (1 << 31) - 1


class MallocError(NestPipeError, ValueError):
    exit_code = 2


def keep_large_blocks() -> str:
    """Lets glibc keep blocks of up to 1 GB for reuse, in this whole process; returns what was done, in words.

    Our commands call it where a worker starts.  A script that trains with `TrainPipeline` may call it once, at its start.
    """
    found = _apply(os.environ)
    log.info("malloc: %s", found)
    return found


def _apply(environment: Mapping[str, str]) -> str:
    asked = environment.get(SWITCH, "")
    if asked not in ("", "default", "reuse"):
        raise MallocError(f"{SWITCH} must be 'reuse' or 'default', not {asked!r}")
    if asked == "default":
        return f"as it is, by {SWITCH}"
    given = [name for name in SETTINGS if environment.get(name)]
    if "glibc.malloc." in environment.get("GLIBC_TUNABLES", ""):
        given.append("GLIBC_TUNABLES")
    if given:
        return f"as {given[0]} says"
    preloaded = environment.get("LD_PRELOAD", "")
    if any(name in preloaded for name in OTHERS):
        return "another one, by LD_PRELOAD"
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return "not glibc's"
    # Some versions refuse more than 32 MB, which is less than a tensor of a long step: then no block has pages of its own.
    kept = set_option(_MMAP_THRESHOLD, _LARGEST_BLOCK) == 1 or set_option(_MMAP_MAX, 0) == 1
    kept = set_option(_TRIM_THRESHOLD, _NEVER) == 1 and kept
    return "large blocks are kept for reuse" if kept else "it refused to keep large blocks"
