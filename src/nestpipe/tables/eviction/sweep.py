"""One sweep over one index: chooses rows that are too old or too rarely used.  Reads only their usage."""

from __future__ import annotations

import numpy as np

from nestpipe.keys.index import HashIndex
from nestpipe.tables.eviction import kernels as kernels


class Sweep:
    """Chooses keys of an index to evict.  The index and `usage` must not change meanwhile.

    `usage` and `flags` are by slot.  After `mark`, flags are as they were before, except that the chosen slots are
    MARKED.
    """

    def __init__(self, index: HashIndex, usage: np.ndarray, flags: np.ndarray, before: int, tables: int) -> None:
        """`before`: the batch before the sweep.

        Its keys are never chosen.  Usage identifies those already in the store.
        """
        self._index = index
        self._usage, self._flags = usage, flags
        self._before = before
        self._tables = tables
        self._used = index.slots_used
        self._spared = np.empty(0, np.int64)

    def spare(self, tables: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Excludes keys from the choice.  Returns the places of those that are absent or already marked."""
        slots = self._index.find(keys, tables)
        there = (slots >= 0) & (self._flags[slots] & kernels.MARKED == 0)
        self._spared = slots[there]
        self._flags[self._spared] = kernels.TOUCHED
        return np.flatnonzero(~there)

    def choose_aged(self, horizon: int) -> np.ndarray:
        """Chooses rows last touched before batch `horizon`.  Returns the number of rows left in each table."""
        rows, aged = np.zeros(self._tables, np.int64), np.zeros(self._tables, np.int64)
        kernels.choose_aged(
            self._usage, self._index.slot_tables.rows, self._flags, self._used, self._before, horizon, rows, aged
        )
        return rows - aged

    def choose_rare(self, excess: np.ndarray) -> None:
        """Chooses up to excess[t] more rows of each table t, lowest (frequency, last batch, key) first.

        A histogram of frequencies and one of ages find the edges below which all rows go; only ties are sorted.
        """
        over = np.flatnonzero(excess > 0)
        if not len(over):
            return
        places = np.full(self._tables, -1, np.int64)
        places[over] = np.arange(len(over))
        where = (self._usage, self._index.slot_tables.rows, self._flags, self._used, self._before, places)
        frequencies = np.zeros((len(over), kernels.BINS), np.int64)
        kernels.count_frequencies(*where, frequencies)
        edge, left = _edge(frequencies, excess[over])
        ages = np.zeros((len(over), kernels.BINS), np.int64)
        kernels.count_ages(*where, edge, ages)
        age_edge, age_left = _edge(ages, left)
        highest = edge == kernels.BINS - 1  # this bin mixes frequencies, so all of it is sorted below
        age_edge[highest], age_left[highest] = 0, left[highest]
        tied = np.where(
            highest, frequencies[:, -1], np.take_along_axis(ages, age_edge.clip(max=kernels.BINS - 1)[:, None], 1)[:, 0]
        )
        ties = np.empty(int(tied.sum()), np.int64)
        ties = ties[: kernels.choose_rare(*where, edge, age_edge, ties)]
        self._choose_first(ties, places, age_left)

    def mark(self) -> np.ndarray:
        """Ends the sweep and marks what it chose.  Returns the slots, ascending."""
        self._flags[self._spared] = 0
        slots = np.empty(kernels.count_chosen(self._flags, self._used), np.int64)
        kernels.mark_chosen(self._flags, self._used, slots)
        return slots

    def _choose_first(self, slots: np.ndarray, places: np.ndarray, counts: np.ndarray) -> None:
        """Chooses the first counts[p] slots of each table in order of (frequency, last batch, key)."""
        table = places[self._index.slot_tables.rows[slots]]
        usage, keys = self._usage[slots], self._index.slot_keys.rows[slots]
        order = np.lexsort((keys, usage[:, 1], usage[:, 0], table))
        table = table[order]
        begins = np.searchsorted(table, np.arange(len(counts)))
        first = np.arange(len(table)) - begins[table] < counts[table]
        self._flags[slots[order[first]]] = kernels.CHOSEN


def _edge(histogram: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The bin of each histogram row in which the wanted count is reached, and how many of that bin are wanted.

    If the count is never reached, the bin is one past the last.
    """
    reached = np.cumsum(histogram, axis=1)
    edge = (reached < wanted[:, None]).sum(axis=1)
    below = np.where(edge > 0, np.take_along_axis(reached, (edge - 1).clip(min=0)[:, None], 1)[:, 0], 0)
    return edge, np.minimum(wanted, reached[:, -1]) - below
