"""Numba kernels of the data lane.  All release the GIL; none keeps state."""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(nogil=True, cache=True)
def take_samples(values, offsets, samples, features):  # type: ignore[no-untyped-def]
    """Lengths, values and value numbers of `samples` of a feature-major jagged array."""
    stride = (offsets.shape[0] - 1) // features if features else 0
    lengths = np.empty(features * samples.shape[0], np.int64)
    total = 0
    at = 0
    for f in range(features):
        for i in range(samples.shape[0]):
            b = f * stride + samples[i]
            lengths[at] = offsets[b + 1] - offsets[b]
            total += lengths[at]
            at += 1
    taken = np.empty(total, np.int64)
    source = np.empty(total, np.int64)
    at = 0
    for f in range(features):
        for i in range(samples.shape[0]):
            b = f * stride + samples[i]
            for j in range(offsets[b], offsets[b + 1]):
                taken[at] = values[j]
                source[at] = j
                at += 1
    return lengths, taken, source
