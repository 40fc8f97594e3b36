"""The kernels that draw synthetic histories.  They release the GIL; every number is drawn by counter."""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.data.counter import STEP, bell, mix, power_law_rank, power_law_span, uniform

_ONE, _TWO, _THREE, _FOUR = (np.uint64(n) for n in (1, 2, 3, 4))
_MAIN = 0.75
"""The chance that a free choice is from the main interest."""
_FIRST_TIME = 1_000_000_000


@numba.njit(nogil=True, cache=True)
def item_ids(items: int, key: np.uint64) -> np.ndarray:
    """The ids of items 0..items-1: all different (`mix` is a bijection), in no order."""
    ids = np.empty(items, np.int64)
    for i in range(items):
        ids[i] = np.int64(mix(key + np.uint64(i)))
    return ids


@numba.njit(nogil=True, cache=True)
def draw_lengths(users: int, mean: float, least: int, key: np.uint64) -> np.ndarray:
    """`least` plus a log-normal number, so that the mean is about `mean`."""
    lengths = np.empty(users, np.int64)
    for u in range(users):
        # exp of a normal of variance 1 has the mean exp(1/2).
        spread = np.exp(bell(mix(key + np.uint64(u) * STEP)) - 0.5)
        lengths[u] = least + np.int64((mean - least) * spread + 0.5)
    return lengths


@numba.njit(nogil=True, cache=True)
def draw_histories(  # type: ignore[no-untyped-def]
    offsets, ids, groups, zipf, order, key
):
    """Items (ids) and times of every user.  Item number i is in group i % groups, at place i // groups of it."""
    items = np.empty(offsets[-1], np.int64)
    times = np.empty(offsets[-1], np.int64)
    spans = np.empty(groups, np.float64)
    sizes = np.empty(groups, np.int64)
    for g in range(groups):
        sizes[g] = (ids.shape[0] - g + groups - 1) // groups
        spans[g] = power_law_span(sizes[g], zipf)
    for u in range(offsets.shape[0] - 1):
        user = mix(key + np.uint64(u) * STEP)
        main = int(uniform(mix(user + _ONE)) * groups)
        side = int(uniform(mix(user + _TWO)) * groups)
        time = _FIRST_TIME + int(uniform(mix(user + _THREE)) * 3.0e7)
        item = -1
        for at in range(offsets[u], offsets[u + 1]):
            step = mix(user + np.uint64(at - offsets[u] + 1) * STEP)
            if item >= 0 and uniform(step) < order:
                # What follows an item depends on the item alone, and stays in its group.
                g = item % groups
                draw = uniform(mix(key ^ np.uint64(ids[item])))
            else:
                g = main if uniform(mix(step + _ONE)) < _MAIN else side
                draw = uniform(mix(step + _TWO))
            item = power_law_rank(draw, sizes[g], zipf, spans[g]) * groups + g
            time += 1 + int(np.exp(5.0 + 2.0 * bell(mix(step + _FOUR))))
            items[at] = ids[item]
            times[at] = time
    return items, times
