"""Where each word of an array occurred first: the kernel under every dedup here.

An ordinary hash table, probed word by word, is bound by branches that the CPU cannot predict (new or seen?) and by
loads that wait for stores.  The kernels here make passes that have neither.  Pass one walks backwards and stores every
position in a table, at its word's place, without looking.  The first occurrence is stored last and stays.  Pass two
walks forwards and reads it.  Nothing is cleared, because no place is read before it was written.

Where words are dense (ids below 16 times their number), a word is its own place and the work ends there.  Otherwise the
place is a hash, and a word may find the position of another word.  These few losers are found by comparing.  They go
through ordinary probing with a better hash, so no choice of words is slow.
"""

from __future__ import annotations

import threading

import numba
import numpy as np

from nestpipe.keys.mixing import STEP, mix
from nestpipe.keys.prefetch import prefetch
from nestpipe.keys.slab import Slab

# Unsigned throughout: a signed index costs three instructions more per access, because numba lets it count from the
# end.
_ZERO, _ONE, _CHUNK, _AHEAD, _LINE, _WORD_BITS = (np.uint64(n) for n in (0, 1, 64, 128, 16, 64))
_MULTIPLIER = STEP

MAX_WORDS = 1 << 30
_MAX_PLACES = 1 << 24
_DENSE = 16


class Scratch(threading.local):
    """Each thread's working memory, kept between calls.  Fresh memory costs a page fault per 4 kB, as much as the work
    itself."""

    def __init__(self) -> None:
        # Only touched pages take memory, at most 64 MB.  Ids may be dense in any range up to this size.
        self.places: np.ndarray = Slab(np.int32, (), _MAX_PLACES + 64).rows
        self.ints = np.empty((2, 0), np.int32)
        self.words = np.empty(0, np.uint64)

    def for_words(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(words, reps, losers, places) for `count` words."""
        if count > MAX_WORDS:
            raise ValueError(f"{count} keys in one batch; {MAX_WORDS} is the most")
        if self.ints.shape[1] < count:
            room = 1 << (count - 1).bit_length()
            self.ints, self.words = np.empty((2, room), np.int32), np.empty(room, np.uint64)
        places = self.places
        if 3 * hashed_places(count) > len(places):
            places = np.empty(3 * hashed_places(count), np.int32)
        return self.words[:count], self.ints[0, :count], self.ints[1, :count], places


scratch = Scratch()


@numba.njit(nogil=True, cache=True)
def hashed_places(count):  # type: ignore[no-untyped-def]
    """How many places hashed words get: the power of two a little above their number.  More places would leave fewer
    losers, but lose that gain to cache misses."""
    places = 64
    while 8 * places < 9 * count:
        places *= 2
    return places


@numba.njit(nogil=True, cache=True)
def dense_limit(count):  # type: ignore[no-untyped-def]
    """Words below this, after subtracting the lowest, are their own places."""
    return np.uint64(min(_DENSE * count, _MAX_PLACES))


@numba.njit(nogil=True, cache=True)
def store_dense(words, start, stop, low, places):  # type: ignore[no-untyped-def]
    """places[w - low] = the first position of every word w in start..stop.  Words lie in low..low + dense_limit."""
    i, end, start = np.uint64(stop), np.uint64(start) + _AHEAD, np.uint64(start)
    while i > end:
        i -= _ONE
        prefetch(places, words[i - _AHEAD] - low)
        places[words[i] - low] = np.int32(i)
    while i > start:
        i -= _ONE
        places[words[i] - low] = np.int32(i)


@numba.njit(nogil=True, cache=True)
def read_dense(words, start, stop, low, places, reps):  # type: ignore[no-untyped-def]
    """reps[i] = the least j with words[j] == words[i], after `store_dense` of all positions with the same words."""
    for i in range(np.uint64(start), np.uint64(stop)):
        reps[i] = places[words[i] - low]


_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
"""Shifted left by n, its top 6 bits are different for every n below 64."""
_BIT_OF_TOP_SIX = np.zeros(64, np.uint8)
for _n in range(64):
    _BIT_OF_TOP_SIX[(int(_DE_BRUIJN) << _n & 2**64 - 1) >> 58] = _n
_S58 = np.uint64(58)


@numba.njit(nogil=True, cache=True, inline="always")
def _lowest_bit(x):  # type: ignore[no-untyped-def]
    """The number of zero bits below the lowest set bit of a uint64 that is not 0."""
    return np.uint64(_BIT_OF_TOP_SIX[((x & (~x + _ONE)) * _DE_BRUIJN) >> _S58])


@numba.njit(nogil=True, cache=True)
def firsts_of_any(words, places, losers, reps):  # type: ignore[no-untyped-def]
    """reps[i] = the least j with words[j] == words[i].  `places` has room for 3 * hashed_places(count)."""
    count = np.uint64(words.shape[0])
    size = np.uint64(hashed_places(words.shape[0]))
    shift = _WORD_BITS - _lowest_bit(size)
    warm = np.int32(0)
    for line in range(size // _LINE):  # Reading in order fills the cache far faster than the random stores would.
        warm |= places[np.uint64(line) * _LINE]
    i = count
    while i > _ZERO:
        i -= _ONE
        places[(words[i] * _MULTIPLIER) >> shift] = np.int32(i)
    for j in range(count):
        reps[j] = places[(words[j] * _MULTIPLIER) >> shift]
    lost = _find_losers(words, reps, losers)
    _settle(words, losers[:lost], places[size : size + size + size], reps)
    return warm


@numba.njit(nogil=True, cache=True)
def _find_losers(words, reps, losers):  # type: ignore[no-untyped-def]
    """Positions i whose words[reps[i]] is another word, ascending.  Takes 64 words per unpredictable branch: a store
    per word that moves on only for losers takes 1.6 times as long, a branch per word 2.2 times (2026-11-17, keys of
    bench/dedup.py)."""
    count = np.uint64(words.shape[0])
    lost = _ZERO
    start = _ZERO
    while start < count:
        end = min(start + _CHUNK, count)
        bits = _ZERO
        for i in range(start, end):
            bits |= np.uint64(words[np.uint64(reps[i])] != words[i]) << (i - start)
        while bits != _ZERO:
            losers[lost] = np.int32(start + _lowest_bit(bits))
            lost += _ONE
            bits &= bits - _ONE
        start = end
    return lost


@numba.njit(nogil=True, cache=True)
def _settle(words, losers, places, reps):  # type: ignore[no-untyped-def]
    """Fills reps of the losers by open addressing.  There are at least twice as many places as losers."""
    size = np.uint64(64)
    while np.int64(size) < min(4 * losers.shape[0], places.shape[0]):
        size += size
    places[: np.int64(size)] = -1
    mask = size - _ONE
    for l in range(np.uint64(losers.shape[0])):
        i = np.uint64(losers[l])
        word = words[i]
        at = mix(word) & mask
        # An empty place reads as a huge number, any other as less than i: the minimum claims or finds without a branch.
        p = min(np.uint64(np.uint32(places[at])), i)
        while words[p] != word:
            at = (at + _ONE) & mask
            p = min(np.uint64(np.uint32(places[at])), i)
        places[at] = np.int32(p)
        reps[i] = np.int32(p)
