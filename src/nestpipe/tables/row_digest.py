"""A number that tells whether two sets of rows are the same, bit for bit, whatever their order.

Each row is hashed with its table and key; the hashes are summed.  Sets that differ by chance have the same sum once in 2**64.
"""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.keys.mixing import STEP, hash_of, mix
from nestpipe.tables.snapshot import Rows

_S32 = np.uint64(32)


@numba.njit(nogil=True, cache=True)
def _sum_hashes(tables, keys, values, state):  # type: ignore[no-untyped-def]
    """`values` and `state` are unsigned integers: the bits of what they hold."""
    total = np.uint64(0)
    for i in range(keys.shape[0]):
        h = hash_of(tables[i], keys[i])
        for d in range(values.shape[1]):
            h = (h ^ np.uint64(values[i, d])) * STEP
            h ^= h >> _S32
        for d in range(state.shape[1]):
            h = (h ^ np.uint64(state[i, d])) * STEP
            h ^= h >> _S32
        total += mix(h)
    return total


def row_digest(rows: Rows) -> int:
    """Of all these rows.  Digests of disjoint sets are added (`add_digests`)."""
    return int(_sum_hashes(rows.tables, rows.keys, _bits(rows.values), _bits(rows.state)))


def add_digests(*digests: int) -> int:
    return sum(digests) & (2**64 - 1)


def _bits(array: np.ndarray) -> np.ndarray:
    unsigned = {2: np.uint16, 4: np.uint32, 8: np.uint64}[array.dtype.itemsize]
    return np.ascontiguousarray(array).view(unsigned)
