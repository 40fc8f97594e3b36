"""Kernels that draw negatives.  They release the GIL; every number is drawn by counter."""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.data.counter import STEP, mix

_S32 = np.uint64(32)
_LOW32 = np.uint64(0xFFFFFFFF)
_ALWAYS = np.uint64(1 << 32)


@numba.njit(nogil=True, cache=True)
def draw(out, items, keep, alias, key):  # type: ignore[no-untyped-def]
    """Fills `out` with draws from `items`: by alias tables, or uniform where there are none."""
    if keep.shape[0]:
        draw_weighted(out, items, keep, alias, key)
    else:
        draw_uniform(out, items, key)


@numba.njit(nogil=True, cache=True)
def draw_uniform(out: np.ndarray, catalogue: np.ndarray, key: np.uint64) -> None:
    """Fills `out` with uniform draws from `catalogue`, two from each 64 random bits.

    32 bits times the size, top half: off by at most size / 2^32 from uniform.
    """
    size = np.uint64(catalogue.shape[0])
    pairs = out.shape[0] // 2
    for i in range(pairs):
        bits = mix(key + np.uint64(i) * STEP)
        out[2 * i] = catalogue[np.int64(((bits >> _S32) * size) >> _S32)]
        out[2 * i + 1] = catalogue[np.int64(((bits & _LOW32) * size) >> _S32)]
    if out.shape[0] % 2:
        bits = mix(key + np.uint64(pairs) * STEP)
        out[out.shape[0] - 1] = catalogue[np.int64(((bits >> _S32) * size) >> _S32)]


@numba.njit(nogil=True, cache=True)
def draw_weighted(out, items, keep, alias, key):  # type: ignore[no-untyped-def]
    """A draw takes 64 random bits: one half chooses a place, the other whether its item stays or its alias comes."""
    size = np.uint64(items.shape[0])
    for i in range(out.shape[0]):
        bits = mix(key + np.uint64(i) * STEP)
        place = np.int64(((bits >> _S32) * size) >> _S32)
        out[i] = items[place] if (bits & _LOW32) < keep[place] else items[alias[place]]


@numba.njit(nogil=True, cache=True)
def draw_places(count, size, key):  # type: ignore[no-untyped-def]
    """Uniform draws from 0..size-1, each from the upper half of 64 random bits."""
    out = np.empty(count, np.int64)
    for i in range(count):
        out[i] = np.int64(((mix(key + np.uint64(i) * STEP) >> _S32) * np.uint64(size)) >> _S32)
    return out


@numba.njit(nogil=True, cache=True)
def alias_table(chances):  # type: ignore[no-untyped-def]
    """For chances that add up to 1: thresholds in units of 2^-32, and the item that comes above them (Vose's method)."""
    count = chances.shape[0]
    keep = np.empty(count, np.uint64)
    alias = np.arange(count)
    left = chances * count
    stack = np.empty(count, np.int64)  # small ones from the front, large ones from the back
    small, large = 0, count
    most = 0
    for i in range(count):
        most = i if chances[i] > chances[most] else most
        if left[i] < 1.0:
            stack[small] = i
            small += 1
        else:
            large -= 1
            stack[large] = i
    while small > 0 and large < count:
        small -= 1
        low, high = stack[small], stack[large]
        keep[low] = np.uint64(left[low] * 4294967296.0)
        alias[low] = high
        left[high] -= 1.0 - left[low]
        if left[high] < 1.0:
            large += 1
            stack[small] = high
            small += 1
    for at in range(large, count):
        keep[stack[at]] = _ALWAYS
    for at in range(small):  # 1 but for rounding
        never = chances[stack[at]] == 0
        keep[stack[at]] = np.uint64(0) if never else _ALWAYS
        alias[stack[at]] = most
    return keep, alias
