"""The kernel that lays out histories, targets, negatives and times.  Releases the GIL, keeps no state."""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.data.counter import STEP, mix
from nestpipe.data.negatives_kernels import draw


@numba.njit(nogil=True, cache=True)
def build_sequences(  # type: ignore[no-untyped-def]
    rows, numbers, offsets, cuts, items, times, catalogue, keep, alias, train, max_length, negatives, key
):
    """Lengths [4*B] and values of history, target, negatives and time of the users `rows`, feature-major.

    And, for each of them, the place after the last event of its sample.  Negatives are drawn by `keep` and `alias`
    (`alias_table`), uniform where these are empty.
    """
    count = rows.shape[0]
    lengths = np.empty(4 * count, np.int64)
    stops = np.empty(count, np.int64)  # one after the last target
    history = 0
    target = 0
    for b in range(count):
        start = offsets[rows[b]]
        stops[b] = start + cuts[rows[b]] + (0 if train else 1)
        n = min(stops[b] - start - 1, max_length)
        terms = n if train else 1
        lengths[b] = n
        lengths[count + b] = terms
        lengths[2 * count + b] = terms * negatives
        lengths[3 * count + b] = n + 1
        history += n
        target += terms

    values = np.empty(2 * history + count + target * (1 + negatives), np.int64)
    at_history = 0
    at_target = history
    at_negative = history + target
    at_time = history + target * (1 + negatives)
    for b in range(count):
        n = lengths[b]
        terms = lengths[count + b]
        stop = stops[b]
        values[at_history : at_history + n] = items[stop - 1 - n : stop - 1]
        values[at_target : at_target + terms] = items[stop - terms : stop]
        values[at_time : at_time + n + 1] = times[stop - 1 - n : stop]
        drawn = values[at_negative : at_negative + terms * negatives]
        draw(drawn, catalogue, keep, alias, mix(key + np.uint64(numbers[b]) * STEP))
        at_history += n
        at_target += terms
        at_negative += terms * negatives
        at_time += n + 1
    return lengths, values, stops
