"""Random numbers by counter: a draw depends on a key and a number, never on earlier draws.

So sample i is the same whatever the batch size, the worker or the order of reading.  The n-th number of a key is
`mix(key + n * STEP)`, that is splitmix64 (`keys/mixing.py`).  Do not change a bit here: generated data would change
with it.
"""

from __future__ import annotations

import hashlib

import numba
import numpy as np

from nestpipe.keys.mixing import STEP, mix, uniform

__all__ = ["STEP", "bell", "derive", "mix", "permutation", "power_law_rank", "power_law_span", "uniform"]

_S16, _S32, _S48 = (np.uint64(s) for s in (16, 32, 48))
_LOW16 = np.uint64(0xFFFF)
_BELL = 1.0 / (65536.0 / np.sqrt(3.0))


def derive(seed: int, *names: str | int) -> np.uint64:
    """The key of one use of `seed`: every different list of names gives an unrelated key, the same on every machine."""
    digest = hashlib.blake2b(repr((int(seed), *names)).encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


@numba.njit(nogil=True, cache=True, inline="always")
def bell(x: np.uint64) -> float:
    """Random bits to a number of mean 0 and variance 1, nearly normal.  A sum of four, so never beyond 3.5."""
    low = np.int64(x & _LOW16) + np.int64((x >> _S16) & _LOW16)
    high = np.int64((x >> _S32) & _LOW16) + np.int64(x >> _S48)
    return np.float64(low + high - 131070) * _BELL


@numba.njit(nogil=True, cache=True, inline="always")
def power_law_span(count: int, exponent: float) -> float:
    """The part of `power_law_rank` that is the same for every draw."""
    return np.log(count + 1.0) if exponent == 1.0 else (count + 1.0) ** (1.0 - exponent) - 1.0


@numba.njit(nogil=True, cache=True, inline="always")
def power_law_rank(u: float, count: int, exponent: float, span: float) -> int:
    """The u-quantile of a power law over ranks 0..count-1: x^-exponent on 1..count+1, rounded down.

    Analytic, so it needs no table however many ids there are.
    """
    if exponent == 1.0:
        x = np.exp(u * span)
    else:
        x = np.exp(np.log1p(u * span) / (1.0 - exponent))
    return max(0, min(int(x) - 1, count - 1))


@numba.njit(nogil=True, cache=True)
def _marks(count: int, key: np.uint64) -> np.ndarray:
    marks = np.empty(count, np.uint64)
    for i in range(count):
        marks[i] = mix(key + np.uint64(i) * STEP)
    return marks


def permutation(count: int, key: np.uint64) -> np.ndarray:
    """0..count-1 in an order that depends on `key` alone.  `mix` is a bijection, so there are no ties."""
    return np.argsort(_marks(count, key), kind="stable")
