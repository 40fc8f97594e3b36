"""Numba kernels over blocks of rows: hashes, checksums, lookups.  All release the GIL."""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.keys.mixing import mix

_PRIME = np.uint64(0x9FB21C651E98DF25)
_S29 = np.uint64(29)
_UNIT = 1.0 / 18446744073709551616.0


@numba.njit(nogil=True, cache=True)
def hashes_of(keys):  # type: ignore[no-untyped-def]
    """The hash by which a table's rows are sorted: different for different keys."""
    hashes = np.empty(keys.shape[0], np.uint64)
    for i in range(keys.shape[0]):
        hashes[i] = mix(np.uint64(keys[i]))
    return hashes


@numba.njit(nogil=True, cache=True)
def _checksum(words, number, salt):  # type: ignore[no-untyped-def]
    """Of a block's content, its number and its file.  Any change within one aligned 8 bytes is found, others nearly surely.

    Four lanes: a multiplication need not wait for the one before it.
    """
    seed = mix(np.uint64(number) ^ salt)
    a, b, c, d = seed, mix(seed + np.uint64(1)), mix(seed + np.uint64(2)), mix(seed + np.uint64(3))
    at, count = 1, words.shape[0]
    while at + 4 <= count:
        a = (a ^ words[at]) * _PRIME
        b = (b ^ words[at + 1]) * _PRIME
        c = (c ^ words[at + 2]) * _PRIME
        d = (d ^ words[at + 3]) * _PRIME
        a ^= a >> _S29
        b ^= b >> _S29
        c ^= c >> _S29
        d ^= d >> _S29
        at += 4
    while at < count:
        a = (a ^ words[at]) * _PRIME
        a ^= a >> _S29
        at += 1
    return mix(a ^ mix(b ^ mix(c ^ mix(d))))


@numba.njit(nogil=True, cache=True)
def seal_blocks(words, first, salt):  # type: ignore[no-untyped-def]
    """Gives words[i], which is block first + i of its file, its checksum."""
    for i in range(words.shape[0]):
        words[i, 0] = _checksum(words[i], first + i, salt)


@numba.njit(nogil=True, cache=True)
def first_damaged(words, numbers, salt):  # type: ignore[no-untyped-def]
    """The first i for which words[i] is not block numbers[i] of its file; -1 if all are."""
    for i in range(numbers.shape[0]):
        if words[i, 0] != _checksum(words[i], numbers[i], salt):
            return i
    return -1


@numba.njit(nogil=True, cache=True)
def blocks_with(fences, keys, blocks):  # type: ignore[no-untyped-def]
    """The block that has each key, if there is one: the last that begins at or before its hash; -1 before the first.

    Hashes are uniform: the place is guessed and closed in from there.
    """
    count = fences.shape[0]
    for i in range(keys.shape[0]):
        h = mix(np.uint64(keys[i]))
        if count == 0 or fences[0] > h:
            blocks[i] = -1
            continue
        low = min(np.int64(np.float64(h) * _UNIT * count), count - 1)
        step = 1
        if fences[low] <= h:
            high = low + step
            while high < count and fences[high] <= h:
                low = high
                step *= 2
                high = low + step
            high = min(high, count)
        else:
            high = low
            low = high - step
            while low > 0 and fences[low] > h:
                high = low
                step *= 2
                low = high - step
            low = max(low, 0)
        while high - low > 1:
            middle = (low + high) // 2
            if fences[middle] <= h:
                low = middle
            else:
                high = middle
        blocks[i] = low


@numba.njit(nogil=True, cache=True)
def copy_rows(block_keys, block_scales, block_values, total, keys, blocks, places, values, scales):  # type: ignore[no-untyped-def]
    """Copies the row of keys[i] from block blocks[i], which lies at places[i], to values[i] and scales[i].

    `total`: rows of the file.  Returns which keys have a row.
    """
    each, dim = block_keys.shape[1], block_values.shape[2]
    scaled = block_scales.shape[1] > 0
    found = np.zeros(keys.shape[0], np.bool_)
    for i in range(keys.shape[0]):
        if blocks[i] < 0:
            continue
        place, h = places[i], mix(np.uint64(keys[i]))
        low, high = np.int64(0), min(np.int64(each), total - blocks[i] * each)
        while high - low > 1:
            middle = (low + high) // 2
            if mix(np.uint64(block_keys[place, middle])) <= h:
                low = middle
            else:
                high = middle
        if block_keys[place, low] != keys[i]:
            continue
        found[i] = True
        for d in range(dim):
            values[i, d] = block_values[place, low, d]
        if scaled:
            scales[i] = block_scales[place, low]
    return found


@numba.njit(nogil=True, cache=True)
def evict(used, hand, count, limit, slots):  # type: ignore[no-untyped-def]
    """Fills `slots` with `count` slots below `limit` that were not used since the hand last passed; returns the hand."""
    taken = 0
    while taken < count:
        if used[hand] == 1:
            used[hand] = 0
        elif used[hand] == 0:
            used[hand] = 2  # taken by this call
            slots[taken] = hand
            taken += 1
        hand = hand + 1 if hand + 1 < limit else 0
    return hand
