"""The keys of a window (all micro-batches of a batch on this worker): each once, its owner, first and last use.

Rows are frozen from sync to update.  So a row travels once per window, with the micro-batch that uses it first.  Its
gradient travels once, with the micro-batch that uses it last (window dedup).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numba
import numpy as np

from nestpipe.keys.dedup import firsts_of_pairs, number_firsts, tables_differ
from nestpipe.keys.firsts import dense_limit, firsts_of_any, read_dense, scratch, store_dense
from nestpipe.keys.mixing import hash_of, owner_from_hash, word_of


@dataclass(frozen=True)
class Window:
    """U unique keys by (micro-batch of first use, owner, first occurrence), so the rows of a message are a range.

    `inverse`, `last_order` and the window's row buffer count places in that order.
    """

    tables: np.ndarray
    keys: np.ndarray
    inverse: np.ndarray
    """The place of the key of every occurrence, in the order the keys were given."""
    last: np.ndarray
    """The micro-batch of the last use of every key."""
    first_ends: np.ndarray
    """[N, W]: where the run of keys first used in m and owned by w ends.  It begins where the run before ends."""
    last_order: np.ndarray
    """Places ordered by (micro-batch of last use, owner, place)."""
    last_ends: np.ndarray
    """[N, W]: as first_ends, for runs of last_order."""
    by_micro: bool = False
    """Each micro-batch is a window of its own: a key that several use occurs several times."""

    def __len__(self) -> int:
        return len(self.keys)

    def first_range(self, micro: int, owner: int) -> tuple[int, int]:
        return run_of(self.first_ends, micro, owner)

    def last_range(self, micro: int, owner: int) -> tuple[int, int]:
        return run_of(self.last_ends, micro, owner)

    @functools.cached_property
    def first_sizes(self) -> list[list[int]]:
        """[N][W]: keys first used in m and owned by w."""
        return sizes_of(self.first_ends)

    @functools.cached_property
    def last_sizes(self) -> list[list[int]]:
        return sizes_of(self.last_ends)

    def arrived(self, micro: int) -> int:
        """How many rows, counted from the front, have arrived once those of micro-batch `micro` have."""
        return int(self.first_ends[micro, -1])


def run_of(ends: np.ndarray, micro: int, worker: int) -> tuple[int, int]:
    """Where the run of (micro-batch, worker) begins and ends, given the [N, W] ends of all runs."""
    at = micro * ends.shape[1] + worker
    return (ends.item(at - 1) if at else 0), ends.item(at)


def micro_run(ends: np.ndarray, micro: int) -> tuple[int, int]:
    """Where the runs of all workers in a micro-batch begin and end: they lie one after another."""
    workers = ends.shape[1]
    return (ends.item(micro * workers - 1) if micro else 0), ends.item((micro + 1) * workers - 1)


def sizes_of(ends: np.ndarray) -> list[list[int]]:
    """[N][W]: the sizes of all runs."""
    sizes: list[list[int]] = np.diff(ends.reshape(-1), prepend=0).reshape(ends.shape).tolist()
    return sizes


@numba.njit(nogil=True, cache=True)
def order_by(majors, minors, major_count, minor_count):  # type: ignore[no-untyped-def]
    """Stable counting sort by (major, minor): the order, and the [major_count, minor_count] ends of the runs."""
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
def _lowest_of_tables(keys, segment_ends, segment_tables):  # type: ignore[no-untyped-def]
    """The least key of every table, and whether all tables' keys are dense enough to be their own places."""
    limit = dense_limit(keys.shape[0])
    tables = np.int64(segment_tables.max()) + 1 if len(segment_tables) else 0
    low, high = np.zeros(tables, np.int64), np.full(tables, -1, np.int64)
    start = 0
    for s in range(segment_ends.shape[0]):
        end = segment_ends[s]
        if start < end:
            t = segment_tables[s]
            least = most = keys[start]
            for i in range(start, end):
                least = min(least, keys[i])
                most = max(most, keys[i])
            if high[t] >= low[t]:
                least = min(least, low[t])
                most = max(most, high[t])
            low[t], high[t] = least, most
            if np.uint64(most) - np.uint64(least) >= limit:
                return low, False
        start = end
    return low, True


@numba.njit(nogil=True, cache=True)
def _firsts_by_table(keys, segment_ends, segment_tables, low, places, reps):  # type: ignore[no-untyped-def]
    """Goes table by table, so that all tables share the same few places and these stay in the cache."""
    words = keys.view(np.uint64)
    one = np.zeros(segment_ends.shape[0], np.int32)
    segments, ends = order_by(segment_tables, one, low.shape[0], 1)
    begin = 0
    for t in range(low.shape[0]):
        least = np.uint64(low[t])
        for k in range(ends[t, 0] - 1, begin - 1, -1):
            s = segments[k]
            store_dense(words, segment_ends[s - 1] if s else 0, segment_ends[s], least, places)
        for k in range(begin, ends[t, 0]):
            s = segments[k]
            read_dense(words, segment_ends[s - 1] if s else 0, segment_ends[s], least, places, reps)
        begin = ends[t, 0]


@numba.njit(nogil=True, cache=True)
def _firsts(keys, segment_ends, segment_tables, words, reps, losers, places):  # type: ignore[no-untyped-def]
    """reps[i] = the least j with the same table and key."""
    low, dense = _lowest_of_tables(keys, segment_ends, segment_tables)
    if dense:
        _firsts_by_table(keys, segment_ends, segment_tables, low, places, reps)
        return
    tables = np.empty(keys.shape[0], np.uint16)
    start = 0
    for s in range(segment_ends.shape[0]):
        end = segment_ends[s]
        tables[start:end] = segment_tables[s]
        base = word_of(segment_tables[s], 0)
        for i in range(start, end):
            words[i] = np.uint64(keys[i]) + base
        start = end
    firsts_of_any(words, places, losers, reps)
    if tables_differ(tables, reps):
        firsts_of_pairs(tables, keys, reps)


@numba.njit(nogil=True, cache=True)
def _plan(keys, segment_ends, segment_tables, segment_micros, micros, workers, words, reps, losers, places):  # type: ignore[no-untyped-def]
    count = keys.shape[0]
    _firsts(keys, segment_ends, segment_tables, words, reps, losers, places)
    inverse = np.empty(count, np.int32)
    firsts = losers
    found = number_firsts(reps, firsts, inverse)

    found_keys = np.empty(found, np.int64)
    found_tables = np.empty(found, np.uint16)
    first = np.empty(found, np.int32)
    last = np.empty(found, np.int32)
    owners = np.zeros(found, np.int32)
    start = 0
    u = 0
    for s in range(segment_ends.shape[0]):
        t = segment_tables[s]
        m = segment_micros[s]
        end = segment_ends[s]
        begin = u
        while u < found and firsts[u] < end:
            u += 1
        for v in range(begin, u):
            found_keys[v] = keys[firsts[v]]
            found_tables[v] = t
            first[v] = m
        if workers > 1:
            for v in range(begin, u):
                owners[v] = owner_from_hash(hash_of(t, found_keys[v]), workers)
        for i in range(start, end):
            last[np.uint64(inverse[i])] = m
        start = end
    order, first_ends = order_by(first, owners, micros, workers)
    if workers > 1:  # With one owner, the order of first occurrence is the order.
        place = np.empty(found, np.int32)
        for p in range(found):
            place[order[p]] = p
        for i in range(count):
            inverse[i] = place[np.uint64(inverse[i])]
        found_tables, found_keys = found_tables[order], found_keys[order]
        last, owners = last[order], owners[order]
    last_order, last_ends = order_by(last, owners, micros, workers)
    return found_tables, found_keys, inverse, last, first_ends, last_order, last_ends


def plan_window(
    keys: np.ndarray,
    segment_ends: np.ndarray,
    segment_tables: np.ndarray,
    segment_micros: np.ndarray,
    micros: int,
    workers: int,
    by_micro: bool = False,
) -> Window:
    """Plans the keys of a window, given in segments (one per micro-batch and feature, micro-batches ascending).

    `by_micro`: dedup per micro-batch.  More rows travel, but a worker holds those of one micro-batch only.
    """
    if by_micro:
        return _plan_by_micro(keys, segment_ends, segment_tables, segment_micros, micros, workers)
    room = scratch.for_words(len(keys))
    return Window(*_plan(keys, segment_ends, segment_tables, segment_micros, micros, workers, *room))


def _plan_by_micro(keys, segment_ends, segment_tables, segment_micros, micros, workers) -> Window:  # type: ignore[no-untyped-def]
    """Plans every micro-batch as a window of its own and concatenates the plans."""
    first_ends = np.empty((micros, workers), np.int64)
    tables: list[np.ndarray] = []
    unique: list[np.ndarray] = []
    inverse: list[np.ndarray] = []
    done = rows = 0
    for m in range(micros):
        mine = segment_micros == m
        end = int(segment_ends[mine][-1]) if mine.any() else done
        zeros = np.zeros(int(mine.sum()), np.int32)
        part = plan_window(keys[done:end], segment_ends[mine] - done, segment_tables[mine], zeros, 1, workers)
        tables.append(part.tables)
        unique.append(part.keys)
        inverse.append(part.inverse + np.int32(rows))
        first_ends[m] = part.first_ends[0] + rows
        rows += len(part)
        done = end
    last = np.repeat(np.arange(micros, dtype=np.int32), np.diff(first_ends[:, -1], prepend=0))
    order = np.arange(rows, dtype=np.int32)
    return Window(
        np.concatenate(tables),
        np.concatenate(unique),
        np.concatenate(inverse),
        last,
        first_ends,
        order,
        first_ends,
        by_micro=True,
    )
