"""What memory holds that nobody has written: NaN as a float of any width, a large odd number as an integer."""

from __future__ import annotations

import torch

_PATTERN = 0x7FFFFFFF
"""In four bytes: NaN as float32; NaN as float64, bfloat16 or float16 when repeated; no valid index."""


def poison_bytes(raw: torch.Tensor) -> None:
    """Fills a uint8 tensor, a multiple of four bytes long."""
    raw.view(torch.int32).fill_(_PATTERN)


def poison_values(tensor: torch.Tensor) -> None:
    """Fills any view, by its own type."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
