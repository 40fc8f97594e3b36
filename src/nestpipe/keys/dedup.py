"""Unique keys in order of first occurrence, and the intersection of two sets of (table, key) pairs."""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.keys.firsts import dense_limit, firsts_of_any, scratch, store_dense
from nestpipe.keys.mixing import hash_of, word_of

_BLOCK = 4096


@numba.njit(nogil=True, cache=True, inline="always")
def capacity_for(count):  # type: ignore[no-untyped-def]
    """The size of an open-addressing table for `count` keys: a power of two, at least 1.5 times `count`."""
    capacity = 16
    while 2 * capacity < 3 * count:
        capacity *= 2
    return capacity


@numba.njit(nogil=True, cache=True)
def _extremes(keys, low, high):  # type: ignore[no-untyped-def]
    """Fills the least and the greatest key of each block."""
    for b in range(low.shape[0]):
        least = most = keys[b * _BLOCK]
        for i in range(b * _BLOCK, min((b + 1) * _BLOCK, keys.shape[0])):
            least = min(least, keys[i])
            most = max(most, keys[i])
        low[b], high[b] = least, most


@numba.njit(nogil=True, cache=True)
def _cut(keys, start, stop, before, later):  # type: ignore[no-untyped-def]
    """Looks in start..stop for a place where all keys before it are less than all keys after it.  `before` is the
    greatest key before `start`, `later` the least one from `stop` on.  Returns (place or -1, greatest key before it,
    least key after it)."""
    at = stop
    least = later
    while at > start and keys[at - 1] > before:
        at -= 1
        least = min(least, keys[at])
    most = before
    for i in range(start, at):
        most = max(most, keys[i])
    return (at if most < least else -1), most, least


@numba.njit(nogil=True, cache=True)
def _runs(keys, limit):  # type: ignore[no-untyped-def]
    """Cuts the keys into runs: all keys of a run are less than all keys of the next, as where each feature has its own
    id range. Returns the runs' ends and least keys, or empty arrays where a run spans `limit` or more.

    On these ids `dedup` takes 1.9 times as long without it (1.6 to 2.5), on others the same
    (`python bench/kernels.py`, 2026-11-17, median and quartiles of 60 turns).
    """
    blocks = (keys.shape[0] + _BLOCK - 1) // _BLOCK
    after, high = np.empty(blocks + 1, np.int64), np.empty(blocks, np.int64)
    _extremes(keys, after[:blocks], high)
    after[blocks] = np.iinfo(np.int64).max
    for b in range(blocks - 1, -1, -1):
        after[b] = min(after[b], after[b + 1])  # now the least key from this block on
    ends, lows = np.empty(2 * blocks, np.int64), np.empty(2 * blocks, np.int64)
    found = 0
    start, low = 0, after[0]
    before = np.int64(np.iinfo(np.int64).min)  # the greatest key before this block
    for b in range(blocks):
        stop = min((b + 1) * _BLOCK, keys.shape[0])
        if start < b * _BLOCK and before < after[b + 1] and before < high[b]:
            at, most, least = _cut(keys, b * _BLOCK, stop, before, after[b + 1])
            if at >= 0 and at < stop:
                if np.uint64(most) - np.uint64(low) >= limit:
                    return ends[:0], lows[:0]
                ends[found], lows[found] = at, low
                found += 1
                start, low = at, least
        before = max(before, high[b])
        if before < after[b + 1] or b + 1 == blocks:
            if np.uint64(before) - np.uint64(low) >= limit:
                return ends[:0], lows[:0]
            ends[found], lows[found] = stop, low
            found += 1
            start, low = stop, after[b + 1]
    return ends[:found], lows[:found]


@numba.njit(nogil=True, cache=True)
def _dedup(keys, reps, losers, places, unique, inverse):  # type: ignore[no-untyped-def]
    """Fills `inverse` and the beginning of `unique`; returns how many keys are unique.  Runs share one small table,
    which stays in the cache.  Keys that are not dense in their run go through a hash."""
    words = keys.view(np.uint64)
    ends, lows = _runs(keys, dense_limit(keys.shape[0]))
    found = np.uint64(0)
    if len(ends) == 0:
        firsts_of_any(words, places, losers, reps)
        for i in range(np.uint64(keys.shape[0])):
            found = _number(keys, i, np.uint64(reps[i]), found, unique, inverse)
        return found
    start = np.uint64(0)
    for r in range(len(ends)):
        end, low = np.uint64(ends[r]), np.uint64(lows[r])
        store_dense(words, start, end, low, places)
        for i in range(start, end):
            found = _number(keys, i, np.uint64(places[words[i] - low]), found, unique, inverse)
        start = end
    return found


@numba.njit(nogil=True, cache=True, inline="always")
def _number(keys, i, rep, found, unique, inverse):  # type: ignore[no-untyped-def]
    """Numbers key i, whose first occurrence is at `rep`; returns the number of unique keys so far."""
    # Store, load and store again: a choice between two values would become a branch.
    inverse[i] = found
    inverse[i] = inverse[rep]
    unique[found] = keys[i]
    return found + np.uint64(rep == i)


def dedup(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unique int64 keys in order of first occurrence, and the place of every key among them.  Safe from any thread."""
    keys = np.ascontiguousarray(keys, dtype=np.int64)
    if keys.ndim != 1:
        raise ValueError(f"dedup takes a one-dimensional array of keys, not one of shape {keys.shape}")
    unique, inverse = np.empty(len(keys), np.int64), np.empty(len(keys), np.int64)
    if len(keys):
        _, reps, losers, places = scratch.for_words(len(keys))
        found = _dedup(keys, reps, losers, places, unique, inverse)
        unique.resize(found, refcheck=False)  # Frees the rest without a copy: no one else holds this array yet.
    return unique, inverse


@numba.njit(nogil=True, cache=True)
def number_firsts(reps, firsts, inverse):  # type: ignore[no-untyped-def]
    """Numbers distinct words by first occurrence: firsts[u] = where u is first, inverse[i] = the number of i."""
    found = np.uint64(0)
    for i in range(np.uint64(reps.shape[0])):
        rep = np.uint64(reps[i])
        inverse[i] = found
        inverse[i] = inverse[rep]
        firsts[found] = i
        found += np.uint64(rep == i)
    return np.int64(found)


@numba.njit(nogil=True, cache=True)
def tables_differ(tables, reps):  # type: ignore[no-untyped-def]
    """Whether pairs of two tables have the same word.  Only then are words not enough to tell pairs apart."""
    differ = False
    for i in range(np.uint64(reps.shape[0])):
        differ |= tables[np.uint64(reps[i])] != tables[i]
    return differ


@numba.njit(nogil=True, cache=True)
def firsts_of_pairs(tables, keys, reps):  # type: ignore[no-untyped-def]
    """As firsts_of_any, but compares both halves of every pair: for the case that two pairs have the same word."""
    places = np.full(capacity_for(keys.shape[0]), -1, np.int32)
    mask = np.uint64(places.shape[0] - 1)
    for i in range(keys.shape[0]):
        at = hash_of(tables[i], keys[i]) & mask
        while places[at] >= 0 and (keys[places[at]] != keys[i] or tables[places[at]] != tables[i]):
            at = (at + np.uint64(1)) & mask
        if places[at] < 0:
            places[at] = i
        reps[i] = places[at]


@numba.njit(nogil=True, cache=True)
def _dedup_pairs(tables, keys, words, reps, losers, places, inverse):  # type: ignore[no-untyped-def]
    for i in range(keys.shape[0]):
        words[i] = word_of(tables[i], keys[i])
    firsts_of_any(words, places, losers, reps)
    if tables_differ(tables, reps):
        firsts_of_pairs(tables, keys, reps)
    firsts = losers
    found = number_firsts(reps, firsts, inverse)
    unique_tables, unique_keys = np.empty(found, tables.dtype), np.empty(found, np.int64)
    for u in range(found):
        unique_tables[u] = tables[firsts[u]]
        unique_keys[u] = keys[firsts[u]]
    return unique_tables, unique_keys


def dedup_pairs(tables: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `dedup`, for (table, key) pairs: unique tables, unique keys, inverse (int32)."""
    inverse = np.empty(len(keys), np.int32)
    unique_tables, unique_keys = _dedup_pairs(tables, keys, *scratch.for_words(len(keys)), inverse)
    return unique_tables, unique_keys, inverse


@numba.njit(nogil=True, cache=True)
def intersect_pairs(tables_a, keys_a, tables_b, keys_b):  # type: ignore[no-untyped-def]
    """Places (in a, in b) of the pairs that occur in both, ordered by place in b.  Neither side has a pair twice."""
    capacity = capacity_for(keys_a.shape[0])
    mask = np.uint64(capacity - 1)
    table = np.full(capacity, -1, np.int32)
    for i in range(keys_a.shape[0]):
        at = hash_of(tables_a[i], keys_a[i]) & mask
        while table[at] >= 0:
            at = (at + np.uint64(1)) & mask
        table[at] = i
    shared_a = np.empty(min(keys_a.shape[0], keys_b.shape[0]), np.int64)
    shared_b = np.empty(shared_a.shape[0], np.int64)
    found = 0
    for j in range(keys_b.shape[0]):
        at = hash_of(tables_b[j], keys_b[j]) & mask
        while table[at] >= 0:
            i = table[at]
            if keys_a[i] == keys_b[j] and tables_a[i] == tables_b[j]:
                shared_a[found] = i
                shared_b[found] = j
                found += 1
                break
            at = (at + np.uint64(1)) & mask
    return shared_a[:found], shared_b[:found]
