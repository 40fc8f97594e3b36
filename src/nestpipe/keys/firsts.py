"""Where each word of an array occurred first: the kernel under every dedup here.

A hash table asked and answered word by word is bound by branches that nobody can predict (new or seen?) and by loads that wait
for stores.  So this goes over the words in passes without either.  Pass one walks backwards and stores every position in a table
at its word's place, blindly: what stays there is the first occurrence.  Pass two walks forwards and reads it.  Nothing is
cleared, since no place is read that was not written.  Where words are dense (ids below 16 times their number) the place is the
word itself and that is all.  Else it is a hash, and a word may find another one's position: those few losers, found by comparing,
go through ordinary probing with a better hash, so that no choice of words is slow.
"""

from __future__ import annotations

import threading

import numba
import numpy as np

from nestpipe.keys.mixing import mix
from nestpipe.keys.native import prefetch_to_write, trailing_zeros
from nestpipe.keys.slab import Slab

# Unsigned all through: numba makes signed indices count from the end where negative, three instructions per access.
_ZERO, _ONE, _CHUNK, _AHEAD, _LINE, _WORD_BITS = (np.uint64(n) for n in (0, 1, 64, 128, 16, 64))
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

MAX_WORDS = 1 << 30
_MAX_PLACES = 1 << 24
_DENSE = 16


class Scratch(threading.local):
    """Each thread's working memory, kept between calls: fresh memory costs a page fault per 4 kB, as much as the work itself."""

    def __init__(self) -> None:
        # Only pages that are touched take memory, at most 64 MB, so that ids may be dense in any range up to this.
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
    """How many places hashed words get: the power of two a little above their number.  More would leave fewer losers, but
    what is saved there is lost to the cache."""
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
    """Leaves in places[w - low] the first position of every word w in start..stop; words lie in low..low + dense_limit."""
    i, end, start = np.uint64(stop), np.uint64(start) + _AHEAD, np.uint64(start)
    while i > end:
        i -= _ONE
        prefetch_to_write(places, words[i - _AHEAD] - low)
        places[words[i] - low] = np.int32(i)
    while i > start:
        i -= _ONE
        places[words[i] - low] = np.int32(i)


@numba.njit(nogil=True, cache=True)
def read_dense(words, start, stop, low, places, reps):  # type: ignore[no-untyped-def]
    """After `store_dense` of all positions that may hold the same words: reps[i] = the least j with words[j] == words[i]."""
    for i in range(np.uint64(start), np.uint64(stop)):
        reps[i] = places[words[i] - low]


@numba.njit(nogil=True, cache=True)
def firsts_of_any(words, places, losers, reps):  # type: ignore[no-untyped-def]
    """reps[i] = the least j with words[j] == words[i].  `places` has room for 3 * hashed_places(count)."""
    count = np.uint64(words.shape[0])
    size = np.uint64(hashed_places(words.shape[0]))
    shift = np.uint64(_WORD_BITS - trailing_zeros(size))
    warm = np.int32(0)
    for line in range(
        size // _LINE
    ):  # Reading in order brings the table nearer far faster than the random stores would.
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
    """Positions i whose words[reps[i]] is another word, ascending, 64 at a time: one unpredictable branch for 64 words."""
    count = np.uint64(words.shape[0])
    lost = _ZERO
    start = _ZERO
    while start < count:
        end = min(start + _CHUNK, count)
        bits = _ZERO
        for i in range(start, end):
            bits |= np.uint64(words[np.uint64(reps[i])] != words[i]) << (i - start)
        while bits != _ZERO:
            losers[lost] = np.int32(start + trailing_zeros(bits))
            lost += _ONE
            bits &= bits - _ONE
        start = end
    return lost


@numba.njit(nogil=True, cache=True)
def _settle(words, losers, places, reps):  # type: ignore[no-untyped-def]
    """The reps of the losers, by open addressing.  There are at least twice as many places as losers."""
    size = np.uint64(64)
    while np.int64(size) < min(4 * losers.shape[0], places.shape[0]):
        size += size
    places[: np.int64(size)] = -1
    mask = size - _ONE
    for l in range(np.uint64(losers.shape[0])):
        i = np.uint64(losers[l])
        word = words[i]
        at = mix(word) & mask
        # An empty place reads as a huge number and any other as less than i: the minimum claims or finds without a branch.
        p = min(np.uint64(np.uint32(places[at])), i)
        while words[p] != word:
            at = (at + _ONE) & mask
            p = min(np.uint64(np.uint32(places[at])), i)
        places[at] = np.int32(p)
        reps[i] = np.int32(p)
