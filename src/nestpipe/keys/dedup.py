"""Unique keys in order of first occurrence, and the intersection of two key sets."""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.keys.firsts import dense_limit, firsts_of_any, firsts_of_dense, scratch
from nestpipe.keys.mixing import hash_of, word_of

_BLOCK = 4096


@numba.njit(nogil=True, cache=True, inline="always")
def capacity_for(count):  # type: ignore[no-untyped-def]
    """A power of two at least 1.5 times `count`: what an open-addressing table of `count` keys is given here."""
    capacity = 16
    while 2 * capacity < 3 * count:
        capacity *= 2
    return capacity


@numba.njit(nogil=True, cache=True)
def _lowest(keys, limit):  # type: ignore[no-untyped-def]
    """The least key, and whether all are less than `limit` above it.  Gives up early where they are not."""
    low = high = keys[0]
    for start in range(0, keys.shape[0], _BLOCK):
        for i in range(start, min(start + _BLOCK, keys.shape[0])):
            low = min(low, keys[i])
            high = max(high, keys[i])
        if np.uint64(high) - np.uint64(low) >= limit:
            return low, False
    return low, True


@numba.njit(nogil=True, cache=True)
def _dedup(keys, reps, losers, places, unique, inverse):  # type: ignore[no-untyped-def]
    words = keys.view(np.uint64)
    low, dense = _lowest(keys, dense_limit(keys.shape[0]))
    if dense:
        firsts_of_dense(words, np.uint64(low), places, reps)
    else:
        firsts_of_any(words, places, losers, reps)
    found = np.uint64(0)
    for i in range(np.uint64(keys.shape[0])):
        # Stored, loaded and stored again so that there is no choice between two values, which would become a branch.
        rep = np.uint64(reps[i])
        inverse[i] = found
        inverse[i] = inverse[rep]
        unique[found] = keys[i]
        found += np.uint64(rep == i)
    return found


def dedup(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unique int64 keys in order of first occurrence, and for every key its place among them.  Safe from any thread."""
    keys = np.ascontiguousarray(keys, dtype=np.int64)
    if keys.ndim != 1:
        raise ValueError(f"dedup takes one row of keys, not an array of shape {keys.shape}")
    unique, inverse = np.empty(len(keys), np.int64), np.empty(len(keys), np.int64)
    if len(keys):
        _, reps, losers, places = scratch.for_words(len(keys))
        found = _dedup(keys, reps, losers, places, unique, inverse)
        unique.resize(found, refcheck=False)  # Gives the rest back without a copy: nobody else has seen this array.
    return unique, inverse


@numba.njit(nogil=True, cache=True)
def number_firsts(reps, firsts, inverse):  # type: ignore[no-untyped-def]
    """Numbers different words in order of first occurrence: firsts[u] = where u is first, inverse[i] = the number of i."""
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
    """Whether two tables' pairs were taken for one, which is the only way that words can deceive."""
    differ = False
    for i in range(np.uint64(reps.shape[0])):
        differ |= tables[np.uint64(reps[i])] != tables[i]
    return differ


@numba.njit(nogil=True, cache=True)
def firsts_of_pairs(tables, keys, reps):  # type: ignore[no-untyped-def]
    """As firsts_of_any, comparing both halves of every pair: for the case that two pairs have the same word."""
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
    """Places (in a, in b) of the pairs that occur in both; each side has no pair twice; ordered by place in b."""
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


def intersect(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Places in `a` and in `b` of the int64 keys that both hold, in the order of `b`.  Neither holds a key twice."""
    a, b = np.ascontiguousarray(a, dtype=np.int64), np.ascontiguousarray(b, dtype=np.int64)
    shared_a, shared_b = intersect_pairs(np.zeros(len(a), np.uint16), a, np.zeros(len(b), np.uint16), b)
    return shared_a, shared_b
