"""The first value of a row: it depends on seed, table and key alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numba
import numpy as np

from nestpipe.keys.mixing import STEP, mix, uniform
from nestpipe.tables.config import TableConfig


@numba.njit(nogil=True, cache=True)
def first_values(rows, missing, keys, tables, table_seeds, normal, scales):  # type: ignore[no-untyped-def]
    """Fills rows[i] for every i in `missing` from (table seed, key) alone.

    `normal[t]`, `scales[t]`: table t's distribution.
    """
    dim = rows.shape[1]
    for j in range(missing.shape[0]):
        i = missing[j]
        t = tables[i]
        base = mix(mix(np.uint64(keys[i])) ^ table_seeds[t])
        for d in range(dim):
            u = uniform(mix(base + np.uint64(2 * d + 1) * STEP))
            if normal[t]:
                v = uniform(mix(base + np.uint64(2 * d + 2) * STEP))
                x = math.sqrt(-2.0 * math.log(1.0 - u)) * math.cos(2.0 * math.pi * v)
            else:
                x = 2.0 * u - 1.0
            rows[i, d] = scales[t] * x


class FirstValues:
    """The first values of some tables' rows, by table number: what training gives a key that has no row yet."""

    def __init__(self, tables: Sequence[TableConfig], seed: int) -> None:
        self._seeds = np.array([int(mix(np.uint64(t.name_hash ^ (seed & (2**64 - 1))))) for t in tables], np.uint64)
        self._normal = np.array([t.init == "normal" for t in tables])
        self._scales = np.array([t.init_scale for t in tables], np.float64)

    def fill(self, values: np.ndarray, missing: np.ndarray, keys: np.ndarray, tables: np.ndarray) -> None:
        """Fills values[i] for every i in `missing`."""
        first_values(values, missing, keys, tables, self._seeds, self._normal, self._scales)
