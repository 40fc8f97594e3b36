"""Hashing of (table, key) pairs.  A change here moves rows between workers and breaks old checkpoints' placement."""

from __future__ import annotations

import numba
import numpy as np

_TABLE_STEP = np.uint64(0x9E3779B97F4A7C15)
_MUL_1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL_2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31, _S32 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32)
_LOW_32 = np.uint64(0xFFFFFFFF)


@numba.njit(nogil=True, cache=True, inline="always")
def mix(x):  # type: ignore[no-untyped-def]
    """The finalizer of splitmix64: a bijection of uint64 whose every output bit depends on every input bit."""
    x = (x ^ (x >> _S30)) * _MUL_1
    x = (x ^ (x >> _S27)) * _MUL_2
    return x ^ (x >> _S31)


@numba.njit(nogil=True, cache=True, inline="always")
def word_of(table, key):  # type: ignore[no-untyped-def]
    """One word for a pair: different for different keys of a table, hardly ever the same for different tables."""
    return np.uint64(key) + np.uint64(table) * _TABLE_STEP


@numba.njit(nogil=True, cache=True, inline="always")
def hash_of(table, key):  # type: ignore[no-untyped-def]
    """64 mixed bits of a (table, key) pair."""
    return mix(word_of(table, key))


@numba.njit(nogil=True, cache=True, inline="always")
def owner_from_hash(h, workers):  # type: ignore[no-untyped-def]
    """Which of `workers` owns a hash: its high 32 bits scaled down, so unbiased to 2**-32."""
    return np.int64(((h >> _S32) & _LOW_32) * np.uint64(workers) >> _S32)


def share_of(worker: int, workers: int) -> range:
    """The high 32 bits of the hashes that one of `workers` owns: a range, so that another number of workers cuts few of them."""
    return range(-(-(worker << 32) // workers), -(-((worker + 1) << 32) // workers))


@numba.njit(nogil=True, cache=True)
def owners_of(tables, keys, workers):  # type: ignore[no-untyped-def]
    """The owner of every (table, key) pair, int64 in 0..workers-1; depends on nothing else."""
    owners = np.empty(keys.shape[0], np.int64)
    for i in range(keys.shape[0]):
        owners[i] = owner_from_hash(hash_of(tables[i], keys[i]), workers)
    return owners
