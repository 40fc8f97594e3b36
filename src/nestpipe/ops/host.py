"""Where the numba kernels run."""

from __future__ import annotations

import torch
from torch import Tensor


def has_kernels(tensor: Tensor) -> bool:
    """Whether numba kernels take this tensor: float32 or float64 on the host.  Others take the reference."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)
