"""Numba kernels of sightings and sweeps.  All release the GIL, and none looks at anything of a row but its two numbers of life.

`life[slot]` is (sightings, last batch that touched it); no sightings: nobody is there.  `marks[slot]` is what a sweep has to know
beside it.
"""

from __future__ import annotations

import numba
import numpy as np

CONDEMNED = np.uint8(1)
"""Evicted by a sweep whose batch is not in the tables yet."""
TOUCHED = np.uint8(2)
"""By the batch before the sweep."""
CHOSEN = np.uint8(4)
"""By the sweep that is going on."""
BINS = 1024
_HIGHEST = BINS - 1


@numba.njit(nogil=True, cache=True)
def sight(life, batch, most, admit_after, waiting):  # type: ignore[no-untyped-def]
    """One sighting more for every row.  `waiting` gets the places of those that are not admitted yet; returns how many."""
    count = 0
    for i in range(life.shape[0]):
        if life[i, 0] < most:
            life[i, 0] += 1
        life[i, 1] = batch
        if life[i, 0] < admit_after:
            waiting[count] = i
            count += 1
    return count


@numba.njit(nogil=True, cache=True)
def keep_life(source, target, slots):  # type: ignore[no-untyped-def]
    """target[slots[i]] = source[i]."""
    for i in range(slots.shape[0]):
        target[slots[i], 0] = source[i, 0]
        target[slots[i], 1] = source[i, 1]


@numba.njit(nogil=True, cache=True)
def choose_aged(life, slot_tables, marks, used, before, horizon, rows, aged):  # type: ignore[no-untyped-def]
    """Chooses those that no batch from `horizon` on has touched.  Counts, per table, all that are there and those chosen."""
    for s in range(used):
        if life[s, 0] == 0 or marks[s] & CONDEMNED:
            continue
        table = slot_tables[s]
        rows[table] += 1
        if life[s, 1] < horizon and life[s, 1] != before and marks[s] == 0:
            marks[s] = CHOSEN
            aged[table] += 1


@numba.njit(nogil=True, cache=True, inline="always")
def _may_go(seen, last, mark, before):  # type: ignore[no-untyped-def]
    """Whether whoever was seen so often, and last then, can be evicted.  Takes numbers: arrays would be counted as they come."""
    return (seen != 0) & (mark == 0) & (last != before)


@numba.njit(nogil=True, cache=True, inline="always")
def _seen_bin(seen):  # type: ignore[no-untyped-def]
    return np.int64(seen) if seen < _HIGHEST else np.int64(_HIGHEST)


@numba.njit(nogil=True, cache=True)
def count_sightings(life, slot_tables, marks, used, before, places, histogram):  # type: ignore[no-untyped-def]
    """histogram[place of the table, sightings]; the highest bin is for all that were seen as often or oftener.  places[table] is
    -1 for a table that has nothing to give away."""
    for s in range(used):
        p = places[slot_tables[s]]
        if p >= 0 and _may_go(life[s, 0], life[s, 1], marks[s], before):
            histogram[p, _seen_bin(life[s, 0])] += 1


@numba.njit(nogil=True, cache=True, inline="always")
def _age_bin(last, before):  # type: ignore[no-untyped-def]
    """Later batches are in no lower bin."""
    bin_of_last = np.int64(last) * BINS // (before + 1)
    return bin_of_last if bin_of_last < _HIGHEST else np.int64(_HIGHEST)


@numba.njit(nogil=True, cache=True)
def count_ages(life, slot_tables, marks, used, before, places, cut, histogram):  # type: ignore[no-untyped-def]
    """The same by last batch, 0 to `before`, of those that were seen cut[p] times."""
    for s in range(used):
        p = places[slot_tables[s]]
        if p >= 0 and life[s, 0] == cut[p] and _may_go(life[s, 0], life[s, 1], marks[s], before):
            histogram[p, _age_bin(life[s, 1], before)] += 1


@numba.njit(nogil=True, cache=True)
def choose_rare(life, slot_tables, marks, used, before, places, cut, age_cut, edge):  # type: ignore[no-untyped-def]
    """Chooses those below both cuts.  `edge` gets the slots of those on them, among which keys decide; returns how many."""
    found = 0
    for s in range(used):
        p = places[slot_tables[s]]
        if p < 0 or not _may_go(life[s, 0], life[s, 1], marks[s], before):
            continue
        seen = _seen_bin(life[s, 0])
        age = _age_bin(life[s, 1], before) if seen < _HIGHEST else age_cut[p]
        if seen < cut[p] or (seen == cut[p] and age < age_cut[p]):
            marks[s] = CHOSEN
        elif seen == cut[p] and age == age_cut[p]:
            edge[found] = s
            found += 1
    return found


@numba.njit(nogil=True, cache=True)
def count_chosen(marks, used):  # type: ignore[no-untyped-def]
    count = 0
    for s in range(used):
        count += (marks[s] & CHOSEN) != 0
    return count


@numba.njit(nogil=True, cache=True)
def condemn(marks, used, slots):  # type: ignore[no-untyped-def]
    """Whoever is chosen is condemned; `slots` gets them, ascending."""
    count = 0
    for s in range(used):
        if marks[s] & CHOSEN:
            marks[s] = CONDEMNED
            slots[count] = s
            count += 1
