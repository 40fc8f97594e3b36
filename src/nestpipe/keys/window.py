"""The keys of one window (all micro-batches of a batch on this worker): each once, where first and last used, and whose it is.

Rows are frozen from sync to update, so a row travels once per window, with the micro-batch that uses it first, and its gradient
once, with the micro-batch that uses it last (window dedup).
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from nestpipe.keys.dedup import capacity_for
from nestpipe.keys.mixing import hash_of, owner_from_hash


@dataclass(frozen=True)
class Window:
    """U unique keys ordered by (micro-batch of first use, owner, first occurrence): the rows of a message are a range.

    Places in that order are what `inverse`, `last_order` and the window's row buffer speak of.
    """

    tables: np.ndarray
    keys: np.ndarray
    inverse: np.ndarray
    """For every occurrence, in the order the keys were given, the place of its key."""
    last: np.ndarray
    """For every key the micro-batch of its last use."""
    first_ends: np.ndarray
    """[N, W]: where the keys first used in m and owned by w end; they begin where the one before ends."""
    last_order: np.ndarray
    """Places ordered by (micro-batch of last use, owner, place)."""
    last_ends: np.ndarray
    """[N, W]: as first_ends, into last_order."""

    def __len__(self) -> int:
        return len(self.keys)

    def first_range(self, micro: int, owner: int) -> tuple[int, int]:
        return _range(self.first_ends, micro, owner)

    def last_range(self, micro: int, owner: int) -> tuple[int, int]:
        return _range(self.last_ends, micro, owner)

    def arrived(self, micro: int) -> int:
        """How many rows, counted from the front, are there once micro-batch `micro`'s have come."""
        return int(self.first_ends[micro, -1])


def _range(ends: np.ndarray, micro: int, owner: int) -> tuple[int, int]:
    at = micro * ends.shape[1] + owner
    flat = ends.reshape(-1)
    return (int(flat[at - 1]) if at else 0), int(flat[at])


@numba.njit(nogil=True, cache=True)
def order_by(majors, minors, major_count, minor_count):  # type: ignore[no-untyped-def]
    """A stable counting sort by (major, minor): the order and the [major_count, minor_count] ends of each run."""
    ends = np.zeros(major_count * minor_count, np.int64)
    for i in range(majors.shape[0]):
        ends[majors[i] * minor_count + minors[i]] += 1
    total = 0
    for c in range(ends.shape[0]):
        count = ends[c]
        ends[c] = total
        total += count
    order = np.empty(majors.shape[0], np.int32)
    for i in range(majors.shape[0]):
        c = majors[i] * minor_count + minors[i]
        order[ends[c]] = i
        ends[c] += 1
    return order, ends.reshape(major_count, minor_count)


@numba.njit(nogil=True, cache=True)
def _plan(keys, segment_ends, segment_tables, segment_micros, micros, workers):  # type: ignore[no-untyped-def]
    count = keys.shape[0]
    capacity = capacity_for(count)
    mask = np.uint64(capacity - 1)
    table = np.full(capacity, -1, np.int32)
    found_keys = np.empty(count, np.int64)
    found_tables = np.empty(count, np.uint16)
    first = np.empty(count, np.int32)
    last = np.empty(count, np.int32)
    owners = np.empty(count, np.int32)
    inverse = np.empty(count, np.int32)
    found = 0
    start = 0
    for s in range(segment_ends.shape[0]):
        t = segment_tables[s]
        m = segment_micros[s]
        for i in range(start, segment_ends[s]):
            key = keys[i]
            h = hash_of(t, key)
            at = h & mask
            u = table[at]
            while u >= 0 and (found_keys[u] != key or found_tables[u] != t):
                at = (at + np.uint64(1)) & mask
                u = table[at]
            if u < 0:
                u = np.int32(found)
                table[at] = u
                found_keys[u] = key
                found_tables[u] = t
                first[u] = m
                owners[u] = owner_from_hash(h, workers)
                found += 1
            last[u] = m
            inverse[i] = u
        start = segment_ends[s]
    order, first_ends = order_by(first[:found], owners[:found], micros, workers)
    place = np.empty(found, np.int32)
    sorted_tables = np.empty(found, np.uint16)
    sorted_keys = np.empty(found, np.int64)
    sorted_last = np.empty(found, np.int32)
    sorted_owners = np.empty(found, np.int32)
    for p in range(found):
        u = order[p]
        place[u] = p
        sorted_tables[p] = found_tables[u]
        sorted_keys[p] = found_keys[u]
        sorted_last[p] = last[u]
        sorted_owners[p] = owners[u]
    for i in range(count):
        inverse[i] = place[inverse[i]]
    last_order, last_ends = order_by(sorted_last, sorted_owners, micros, workers)
    return sorted_tables, sorted_keys, inverse, sorted_last, first_ends, last_order, last_ends


def plan_window(
    keys: np.ndarray,
    segment_ends: np.ndarray,
    segment_tables: np.ndarray,
    segment_micros: np.ndarray,
    micros: int,
    workers: int,
) -> Window:
    """Plans the keys of a window, given in segments (one per micro-batch and feature, micro-batches ascending)."""
    return Window(*_plan(keys, segment_ends, segment_tables, segment_micros, micros, workers))
