"""Numba kernels that count key use and sweep.  All release the GIL.  They read only a row's usage, never its values.

`usage[slot]` is (frequency, last batch); frequency 0 means that the slot is empty.  `flags[slot]` is what a sweep must
know beside it.
"""

from __future__ import annotations

import numba
import numpy as np

MARKED = np.uint8(1)
"""Marked for eviction by a sweep whose batch is not written back yet."""
TOUCHED = np.uint8(2)
"""Touched by the batch before the sweep."""
CHOSEN = np.uint8(4)
"""Chosen by the current sweep."""
BINS = 1024
_HIGHEST = BINS - 1


@numba.njit(nogil=True, cache=True)
def count_use(usage, batch, most, admit_after, waiting):  # type: ignore[no-untyped-def]
    """Counts one more use of every row, in `batch`.

    `waiting` gets the places of rows not admitted yet; returns how many.
    """
    count = 0
    for i in range(usage.shape[0]):
        if usage[i, 0] < most:
            usage[i, 0] += 1
        usage[i, 1] = batch
        if usage[i, 0] < admit_after:
            waiting[count] = i
            count += 1
    return count


@numba.njit(nogil=True, cache=True)
def store_usage(source, target, slots):  # type: ignore[no-untyped-def]
    """target[slots[i]] = source[i]."""
    for i in range(slots.shape[0]):
        target[slots[i], 0] = source[i, 0]
        target[slots[i], 1] = source[i, 1]


@numba.njit(nogil=True, cache=True)
def choose_aged(usage, slot_tables, flags, used, before, horizon, rows, aged):  # type: ignore[no-untyped-def]
    """Chooses rows last touched before batch `horizon`.  Adds up, per table, the rows present and those chosen."""
    for s in range(used):
        if usage[s, 0] == 0 or flags[s] & MARKED:
            continue
        table = slot_tables[s]
        rows[table] += 1
        if usage[s, 1] < horizon and usage[s, 1] != before and flags[s] == 0:
            flags[s] = CHOSEN
            aged[table] += 1


@numba.njit(nogil=True, cache=True, inline="always")
def _may_evict(frequency, last, flag, before):  # type: ignore[no-untyped-def]
    """Whether a row can be chosen.  Takes numbers: passing arrays would cost reference counting."""
    return (frequency != 0) & (flag == 0) & (last != before)


@numba.njit(nogil=True, cache=True, inline="always")
def _frequency_bin(frequency):  # type: ignore[no-untyped-def]
    return np.int64(frequency) if frequency < _HIGHEST else np.int64(_HIGHEST)


@numba.njit(nogil=True, cache=True)
def count_frequencies(usage, slot_tables, flags, used, before, places, histogram):  # type: ignore[no-untyped-def]
    """histogram[place of the table, frequency]; the highest bin takes all higher frequencies too.

    places[table] is -1 for a table that need not give up rows.
    """
    for s in range(used):
        p = places[slot_tables[s]]
        if p >= 0 and _may_evict(usage[s, 0], usage[s, 1], flags[s], before):
            histogram[p, _frequency_bin(usage[s, 0])] += 1


@numba.njit(nogil=True, cache=True, inline="always")
def _age_bin(last, before):  # type: ignore[no-untyped-def]
    """Monotonic: a later batch is never in a lower bin."""
    bin_of_last = np.int64(last) * BINS // (before + 1)
    return bin_of_last if bin_of_last < _HIGHEST else np.int64(_HIGHEST)


@numba.njit(nogil=True, cache=True)
def count_ages(usage, slot_tables, flags, used, before, places, edge, histogram):  # type: ignore[no-untyped-def]
    """As `count_frequencies`, by last batch (0 to `before`), of rows with frequency edge[p]."""
    for s in range(used):
        p = places[slot_tables[s]]
        if p >= 0 and usage[s, 0] == edge[p] and _may_evict(usage[s, 0], usage[s, 1], flags[s], before):
            histogram[p, _age_bin(usage[s, 1], before)] += 1


@numba.njit(nogil=True, cache=True)
def choose_rare(usage, slot_tables, flags, used, before, places, edge, age_edge, ties):  # type: ignore[no-untyped-def]
    """Chooses rows below both edges.  `ties` gets the slots on the edges, to be ordered by key; returns how many."""
    found = 0
    for s in range(used):
        p = places[slot_tables[s]]
        if p < 0 or not _may_evict(usage[s, 0], usage[s, 1], flags[s], before):
            continue
        frequency = _frequency_bin(usage[s, 0])
        age = _age_bin(usage[s, 1], before) if frequency < _HIGHEST else age_edge[p]
        if frequency < edge[p] or (frequency == edge[p] and age < age_edge[p]):
            flags[s] = CHOSEN
        elif frequency == edge[p] and age == age_edge[p]:
            ties[found] = s
            found += 1
    return found


@numba.njit(nogil=True, cache=True)
def count_chosen(flags, used):  # type: ignore[no-untyped-def]
    count = 0
    for s in range(used):
        count += (flags[s] & CHOSEN) != 0
    return count


@numba.njit(nogil=True, cache=True)
def mark_chosen(flags, used, slots):  # type: ignore[no-untyped-def]
    """Turns every chosen row into a marked one; `slots` gets them, ascending."""
    count = 0
    for s in range(used):
        if flags[s] & CHOSEN:
            flags[s] = MARKED
            slots[count] = s
            count += 1
