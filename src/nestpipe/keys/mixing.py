"""splitmix64, and the hash of a (table, key) pair built on it.

Do not change a bit of this file: hashes decide which worker owns a row, how a new row starts, and what generated data
holds. Old checkpoints and digests depend on them.

numba's cache does not notice when a callee in another file changes.  After editing the kernels here, delete every
`__pycache__`.
"""

from __future__ import annotations

import numba
import numpy as np

STEP = np.uint64(0x9E3779B97F4A7C15)
"""The increment of splitmix64: `mix(key + n * STEP)` is its n-th number."""
_MUL_1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL_2 = np.uint64(0x94D049BB133111EB)
_S11, _S27, _S30, _S31, _S32 = (np.uint64(s) for s in (11, 27, 30, 31, 32))
_LOW_32 = np.uint64(0xFFFFFFFF)


@numba.njit(nogil=True, cache=True, inline="always")
def mix(x):  # type: ignore[no-untyped-def]
    """The finalizer of splitmix64: a bijection of uint64 whose every output bit depends on every input bit."""
    x = (x ^ (x >> _S30)) * _MUL_1
    x = (x ^ (x >> _S27)) * _MUL_2
    return x ^ (x >> _S31)


@numba.njit(nogil=True, cache=True, inline="always")
def uniform(x):  # type: ignore[no-untyped-def]
    """The upper 53 of 64 random bits as a float64 in [0, 1)."""
    return np.float64(np.int64(x >> _S11)) * (1.0 / 9007199254740992.0)


@numba.njit(nogil=True, cache=True, inline="always")
def word_of(table, key):  # type: ignore[no-untyped-def]
    """One word for a pair: different for different keys of a table, hardly ever the same for different tables."""
    return np.uint64(key) + np.uint64(table) * STEP


@numba.njit(nogil=True, cache=True, inline="always")
def hash_of(table, key):  # type: ignore[no-untyped-def]
    """64 mixed bits of a (table, key) pair."""
    return mix(word_of(table, key))


@numba.njit(nogil=True, cache=True, inline="always")
def owner_from_hash(h, workers):  # type: ignore[no-untyped-def]
    """Which of `workers` owns a hash: its high 32 bits scaled down, so unbiased to 2**-32."""
    return np.int64(((h >> _S32) & _LOW_32) * np.uint64(workers) >> _S32)


def share_of(worker: int, workers: int) -> range:
    """The high 32 bits of the hashes that `worker` owns.  A range, so another number of workers splits few of them."""
    return range(-(-(worker << 32) // workers), -(-((worker + 1) << 32) // workers))


@numba.njit(nogil=True, cache=True)
def owners_of(tables, keys, workers):  # type: ignore[no-untyped-def]
    """The owner of every (table, key) pair, int64 in 0..workers-1.  Depends on nothing else."""
    owners = np.empty(keys.shape[0], np.int64)
    for i in range(keys.shape[0]):
        owners[i] = owner_from_hash(hash_of(tables[i], keys[i]), workers)
    return owners
