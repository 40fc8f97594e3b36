"""Where Triton kernels run: on devices that Triton knows, if it is installed.  Elsewhere torch operations do the same."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

from torch import Tensor

DEVICES = ("cuda", "npu", "xpu")
"""Device types for which Triton compiles.  AMD's GPUs are "cuda" in torch."""


@functools.cache
def available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def kernels_for(like: Tensor, module: str) -> ModuleType | None:
    """The Triton kernels of an operation for tensors such as `like`; None where torch operations have to do."""
    if like.device.type not in DEVICES or not available():
        return None
    return importlib.import_module(f"nestpipe.ops.{module}")
