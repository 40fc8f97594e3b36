"""Rows as they are stored and as they are read: float16, or int8 with a scale for each row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nestpipe.infer.block_layout import Stored

_LEVELS = 127
_LARGEST_HALF = float(np.finfo(np.float16).max)


def encode(values: np.ndarray, stored: Stored) -> tuple[np.ndarray, np.ndarray]:
    """Values [n, dim] as they are stored, and the scale of each row; of int8 only, otherwise none.

    int8: at most half a scale from the value; the scale is the largest number of the row over 127.  A row with NaN or infinity
    becomes all NaN.  float16: ValueError for a number beyond its range.
    """
    if stored == "int8":
        peaks = np.abs(values).max(axis=1, initial=0.0)
        scales = np.asarray(peaks / _LEVELS, np.float32)
        finite = np.isfinite(scales)
        safe = np.where(finite & (scales > 0), scales, 1)[:, None]
        levels = np.rint(values / safe)
        levels[~finite] = 0
        # In float32 the peak can come out as 127.00001.
        return np.clip(levels, -_LEVELS, _LEVELS).astype(np.int8), np.where(finite, scales, np.float32(np.nan))
    if stored == "float16":
        beyond = np.abs(values) > _LARGEST_HALF
        if (beyond & np.isfinite(values)).any():
            raise ValueError(f"a row has {values[beyond][0]:.6g}, which is beyond float16")
        with np.errstate(over="ignore"):
            return values.astype(np.float16), np.empty(0, np.float32)
    return values.astype(np.dtype(stored), copy=False), np.empty(0, np.float32)


def decode(words: np.ndarray, scales: np.ndarray, stored: Stored) -> np.ndarray:
    """Values [n, dim] from what a file has; float32, or float64 where that is stored."""
    if stored == "int8":
        return np.multiply(words.view(np.int8), scales[:, None], dtype=np.float32)
    found = words.view(np.dtype(stored))
    return found.astype(np.float32) if stored == "float16" else found


@dataclass
class RowChange:
    """How far rows moved when they were stored in fewer bits."""

    largest: float = 0.0
    squares: float = 0.0
    change_squares: float = 0.0

    def add(self, values: np.ndarray, read: np.ndarray) -> None:
        change = read.astype(np.float64) - values
        finite = np.isfinite(change).all(axis=1)
        change, values = change[finite], values[finite].astype(np.float64)
        if change.size:
            self.largest = max(self.largest, float(np.abs(change).max()))
            self.squares += float(np.square(values).sum())
            self.change_squares += float(np.square(change).sum())

    @property
    def relative(self) -> float:
        """Root mean square of the change over that of the values."""
        return (self.change_squares / self.squares) ** 0.5 if self.squares else 0.0
