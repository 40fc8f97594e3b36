"""Where Triton kernels run.  They are in files `<op>_triton.py`, which only import where Triton is installed."""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

import torch
from torch import Tensor

DEVICES = ("cuda", "npu", "xpu")
"""Device types for which Triton compiles.  AMD's GPUs are "cuda" in torch."""


def available() -> bool:
    """Whether Triton is installed, and finds a device to run on or interprets its kernels (TRITON_INTERPRET=1)."""
    return _installed() and (os.environ.get("TRITON_INTERPRET") == "1" or _has_device())


def kernels_for(like: Tensor, module: str) -> ModuleType | None:
    """The Triton kernels of an operation for tensors such as `like`; None where torch operations have to do."""
    if like.device.type not in DEVICES or like.dtype not in (torch.float32, torch.float64) or not available():
        return None
    return importlib.import_module(f"nestpipe.ops.{module}")


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
