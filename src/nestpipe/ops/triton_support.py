"""Whether Triton kernels can run here.  They are in files `<op>_triton.py`, which only import where `available()`."""

from __future__ import annotations

import functools
import os


def available() -> bool:
    """Whether Triton is installed, and finds a device to run on or interprets its kernels (TRITON_INTERPRET=1)."""
    return _installed() and (os.environ.get("TRITON_INTERPRET") == "1" or _has_device())


@functools.cache
def _installed() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def _has_device() -> bool:
    from triton.backends import backends

    return any(backend.driver.is_active() for backend in backends.values())
