"""Unique keys in order of first occurrence, and the intersection of two key sets."""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.keys.mixing import hash_of


@numba.njit(nogil=True, cache=True, inline="always")
def capacity_for(count):  # type: ignore[no-untyped-def]
    """A power of two at least 1.5 times `count`: what an open-addressing table of `count` keys is given here."""
    capacity = 16
    while 2 * capacity < 3 * count:
        capacity *= 2
    return capacity


@numba.njit(nogil=True, cache=True)
def _dedup(keys):  # type: ignore[no-untyped-def]
    count = keys.shape[0]
    # Start small and grow with the number of unique keys: batches repeat keys, and a small table stays in cache.
    capacity = capacity_for(min(count, 1 << 14))
    mask = np.uint64(capacity - 1)
    table = np.full(capacity, -1, np.int32)
    unique = np.empty(count, np.int64)
    inverse = np.empty(count, np.int64)
    found = 0
    for i in range(count):
        key = keys[i]
        at = hash_of(0, key) & mask
        while True:
            u = table[at]
            if u < 0:
                table[at] = found
                unique[found] = key
                inverse[i] = found
                found += 1
                break
            if unique[u] == key:
                inverse[i] = u
                break
            at = (at + np.uint64(1)) & mask
        if 3 * found > 2 * capacity:
            capacity *= 4
            mask = np.uint64(capacity - 1)
            table = np.full(capacity, -1, np.int32)
            for u in range(found):
                at = hash_of(0, unique[u]) & mask
                while table[at] >= 0:
                    at = (at + np.uint64(1)) & mask
                table[at] = u
    return unique[:found].copy(), inverse


def dedup(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unique int64 keys in order of first occurrence, and for every key its place among them.  Safe from any thread."""
    keys = np.ascontiguousarray(keys, dtype=np.int64)
    if keys.ndim != 1:
        raise ValueError(f"dedup takes one row of keys, not an array of shape {keys.shape}")
    unique, inverse = _dedup(keys)
    return unique, inverse


@numba.njit(nogil=True, cache=True)
def dedup_pairs(tables, keys):  # type: ignore[no-untyped-def]
    """As `dedup`, for (table, key) pairs: unique tables, unique keys, inverse (int32)."""
    count = keys.shape[0]
    capacity = capacity_for(count)
    mask = np.uint64(capacity - 1)
    table = np.full(capacity, -1, np.int32)
    unique_tables = np.empty(count, tables.dtype)
    unique_keys = np.empty(count, np.int64)
    inverse = np.empty(count, np.int32)
    found = 0
    for i in range(count):
        at = hash_of(tables[i], keys[i]) & mask
        while True:
            u = table[at]
            if u < 0:
                table[at] = found
                unique_tables[found] = tables[i]
                unique_keys[found] = keys[i]
                inverse[i] = found
                found += 1
                break
            if unique_keys[u] == keys[i] and unique_tables[u] == tables[i]:
                inverse[i] = u
                break
            at = (at + np.uint64(1)) & mask
    return unique_tables[:found].copy(), unique_keys[:found].copy(), inverse


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
