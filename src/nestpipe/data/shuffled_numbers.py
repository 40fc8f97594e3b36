"""An order of 0..count-1 that depends on a key alone and needs no memory, however many numbers there are."""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.data.counter import STEP, mix

ROUNDS = 6


@numba.njit(nogil=True, cache=True)
def shuffled_numbers(places: np.ndarray, count: int, key: np.uint64) -> np.ndarray:
    """The numbers at these places of the order.

    A Feistel network permutes all numbers of as many bits as `count` needs; where one falls outside, it is permuted again.
    """
    half = np.uint64(1)
    while (np.uint64(1) << (np.uint64(2) * half)) < np.uint64(count):
        half += np.uint64(1)
    low = (np.uint64(1) << half) - np.uint64(1)
    found = np.empty(places.shape[0], np.int64)
    for at in range(places.shape[0]):
        x = np.uint64(places[at])
        while True:
            left, right = x >> half, x & low
            for r in range(ROUNDS):
                left, right = right, left ^ (mix(mix(key + np.uint64(r) * STEP) ^ right) & low)
            x = (left << half) | right
            if x < np.uint64(count):
                break
        found[at] = np.int64(x)
    return found
