"""One sweep over one index: who is too old, who is too rare.  Reads two numbers of each row and copies none."""

from __future__ import annotations

import numpy as np

from nestpipe.keys.index import HashIndex
from nestpipe.tables.eviction import kernels as kernels


class Sweep:
    """Chooses among the keys of an index.  `life` and `marks` are by slot; marks are as before once `condemn` has been called,
    but for those of the condemned.  Nobody may change the index or life meanwhile.
    """

    def __init__(self, index: HashIndex, life: np.ndarray, marks: np.ndarray, before: int, tables: int) -> None:
        """`before`: the batch before the sweep, whose keys are never chosen; where it is in the store already, that shows."""
        self._index = index
        self._life, self._marks = life, marks
        self._before = before
        self._tables = tables
        self._used = index.slots_used
        self._spared = np.empty(0, np.int64)

    def spare(self, tables: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """These keys are not chosen.  Returns the places of those that are not there, or condemned."""
        slots = self._index.find(keys, tables)
        there = (slots >= 0) & (self._marks[slots] & kernels.CONDEMNED == 0)
        self._spared = slots[there]
        self._marks[self._spared] = kernels.TOUCHED
        return np.flatnonzero(~there)

    def choose_aged(self, horizon: int) -> np.ndarray:
        """Those that no batch from `horizon` on has touched.  Returns how many rows are left of each table."""
        rows, aged = np.zeros(self._tables, np.int64), np.zeros(self._tables, np.int64)
        kernels.choose_aged(
            self._life, self._index.slot_tables.rows, self._marks, self._used, self._before, horizon, rows, aged
        )
        return rows - aged

    def choose_rare(self, excess: np.ndarray) -> None:
        """Of each table so many more (as far as there are) of those with the least (sightings, last batch, key)."""
        over = np.flatnonzero(excess > 0)
        if not len(over):
            return
        places = np.full(self._tables, -1, np.int64)
        places[over] = np.arange(len(over))
        where = (self._life, self._index.slot_tables.rows, self._marks, self._used, self._before, places)
        seen = np.zeros((len(over), kernels.BINS), np.int64)
        kernels.count_sightings(*where, seen)
        cut, left = _cut(seen, excess[over])
        ages = np.zeros((len(over), kernels.BINS), np.int64)
        kernels.count_ages(*where, cut, ages)
        age_cut, age_left = _cut(ages, left)
        highest = cut == kernels.BINS - 1  # in which sightings differ: all of it is sorted below
        age_cut[highest], age_left[highest] = 0, left[highest]
        on_edge = np.where(
            highest, seen[:, -1], np.take_along_axis(ages, age_cut.clip(max=kernels.BINS - 1)[:, None], 1)[:, 0]
        )
        edge = np.empty(int(on_edge.sum()), np.int64)
        edge = edge[: kernels.choose_rare(*where, cut, age_cut, edge)]
        self._choose_first(edge, places, age_left)

    def condemn(self) -> np.ndarray:
        """Ends the sweep: slots of all that were chosen, ascending."""
        self._marks[self._spared] = 0
        slots = np.empty(kernels.count_chosen(self._marks, self._used), np.int64)
        kernels.condemn(self._marks, self._used, slots)
        return slots

    def _choose_first(self, slots: np.ndarray, places: np.ndarray, counts: np.ndarray) -> None:
        """Of those slots the first of each table in order of (sightings, last batch, key)."""
        table = places[self._index.slot_tables.rows[slots]]
        life, keys = self._life[slots], self._index.slot_keys.rows[slots]
        order = np.lexsort((keys, life[:, 1], life[:, 0], table))
        table = table[order]
        begins = np.searchsorted(table, np.arange(len(counts)))
        first = np.arange(len(table)) - begins[table] < counts[table]
        self._marks[slots[order[first]]] = kernels.CHOSEN


def _cut(histogram: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Per row the bin in which the wanted number is reached, one behind the last if in none; and how many of it are wanted."""
    reached = np.cumsum(histogram, axis=1)
    cut = (reached < wanted[:, None]).sum(axis=1)
    below = np.where(cut > 0, np.take_along_axis(reached, (cut - 1).clip(min=0)[:, None], 1)[:, 0], 0)
    return cut, np.minimum(wanted, reached[:, -1]) - below
