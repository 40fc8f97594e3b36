"""Products of tiles inside numba kernels that copy their tiles to fixed places: C = A B or C += A B, nothing transposed."""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.ops.gemm import CELLS, multiply, prepare


@numba.njit(nogil=True, error_model="numpy")
def products_by(gemm, like):  # type: ignore[no-untyped-def]
    """What `product` takes first: the function's address, and room of its own.  `like` has the dtype."""
    products = gemm, np.empty(CELLS, np.int64), np.empty(2, like.dtype)
    prepare(products)
    return products


@numba.njit(nogil=True, error_model="numpy")
def product(products, m, n, k, a, a_step, b, b_step, add, c, c_step):  # type: ignore[no-untyped-def]
    """C [m, n] = A [m, k] B [k, n], or C += A B.  Matrices lie row by row.  a, b and c are addresses."""
    multiply(products, False, False, m, n, k, a, a_step, b, b_step, 1 if add else 0, c, c_step)


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
