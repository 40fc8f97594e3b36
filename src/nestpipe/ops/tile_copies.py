"""Copies of tiles to fixed places, for products inside numba kernels."""

from __future__ import annotations

import numba


@numba.njit(nogil=True, cache=True, error_model="numpy")
def copy_transposed(source, first, count, to):  # type: ignore[no-untyped-def]
    """to[j, i] = source[first + i, j] for `count` rows, in squares that stay in cache."""
    width = source.shape[1]
    for low in range(0, count, 16):
        some = min(16, count - low)
        for j in range(width):
            y = to[j, low : low + some]
            for i in range(some):
                y[i] = source[first + low + i, j]
