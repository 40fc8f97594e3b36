"""Numba kernels of the disk tier: row locations, records with checksums, and read planning.  All release the GIL.

Rows are handled as 32-bit words whatever their dtype, so each kernel is compiled once.  A record is

    row number (2 words), checksum (2 words), values, optimizer state, one word of padding if the total would be odd

Place p of the file is record p % per_segment of segment p // per_segment.  `where[row]` is slot + 1 for a row in DRAM,
-(place + 1) for one on disk, and 0 for one that does not exist.
"""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.keys.mixing import mix
from nestpipe.keys.prefetch import prefetch

HEADER_WORDS = 4
_PRIME = np.uint64(0x9FB21C651E98DF25)
_S29, _S32 = np.uint64(29), np.uint64(32)
_LOW_32 = np.uint64(0xFFFFFFFF)
_AHEAD, _LINE_WORDS = 16, 16


@numba.njit(nogil=True, cache=True)
def locate(where, rows, slots, places):  # type: ignore[no-untyped-def]
    """The DRAM slot or disk place of each row; -1 if it has none.  Negative row numbers have neither."""
    count = rows.shape[0]
    for i in range(count):
        if i + _AHEAD < count and rows[i + _AHEAD] >= 0:
            prefetch(where, np.uint64(rows[i + _AHEAD]))
        at = where[rows[i]] if rows[i] >= 0 else 0
        slots[i] = at - 1 if at > 0 else -1
        places[i] = -at - 1 if at < 0 else -1


@numba.njit(nogil=True, cache=True, inline="always")
def _word(words, at):  # type: ignore[no-untyped-def]
    return np.uint64(words[at]) | (np.uint64(words[at + 1]) << _S32)


@numba.njit(nogil=True, cache=True, inline="always")
def _put_word(words, at, value):  # type: ignore[no-untyped-def]
    words[at] = np.uint32(value & _LOW_32)
    words[at + 1] = np.uint32(value >> _S32)


@numba.njit(nogil=True, cache=True)
def _check_of(words, base, record_words, row, place, generation):  # type: ignore[no-untyped-def]
    """A 64-bit checksum of a record's content, row, place, and generation (how often its segment was used).

    So it detects a record of another row, one from another place and one that a lost write left behind, as well as
    flipped bits.  Each step is a bijection of the checksum and of the word: a change within one aligned 8 bytes is
    always detected, any other with probability 1 - 2**-64.
    """
    check = mix(np.uint64(row) ^ mix(np.uint64(place) ^ mix(np.uint64(generation))))
    for at in range(base + HEADER_WORDS, base + record_words, 2):
        check = (check ^ _word(words, at)) * _PRIME
        check ^= check >> _S29
    return mix(check)


@numba.njit(nogil=True, cache=True)
def encode(words, first, place, generation, record_words, rows, index, values, state):  # type: ignore[no-untyped-def]
    """Writes rows[i] with values[index[i]] and state[index[i]] to `words` as record first + i, which is place + i."""
    dim, width = values.shape[1], state.shape[1]
    for i in range(rows.shape[0]):
        base = (first + i) * record_words
        at = base + HEADER_WORDS
        for d in range(dim):
            words[at + d] = values[index[i], d]
        at += dim
        for d in range(width):
            words[at + d] = state[index[i], d]
        for d in range(at + width, base + record_words):
            words[d] = 0
        _put_word(words, base, np.uint64(rows[i]))
        _put_word(words, base + 2, _check_of(words, base, record_words, rows[i], place + i, generation))


@numba.njit(nogil=True, cache=True)
def decode(  # type: ignore[no-untyped-def]
    words, spots, order, rows, places, generations, per_segment, record_words, target, values, state
):
    """Checks and copies the record at byte spots[j] of `words`, for all j.

    With i = order[j], it must be that of rows[i] at places[i], and goes to values[target[i]] and state[target[i]].
    Returns the first i whose record is wrong, or -1.
    """
    dim, width = values.shape[1], state.shape[1]
    for j in range(order.shape[0]):
        i = order[j]
        if j + _AHEAD < order.shape[0]:
            later = np.uint64(target[order[j + _AHEAD]]) * np.uint64(dim)
            for d in range(0, dim, _LINE_WORDS):
                prefetch(values, later + np.uint64(d))
        base = spots[j] >> 2
        generation = generations[places[i] // per_segment]
        check = _check_of(words, base, record_words, rows[i], places[i], generation)
        if _word(words, base) != np.uint64(rows[i]) or _word(words, base + 2) != check:
            return i
        at = base + HEADER_WORDS
        for d in range(dim):
            values[target[i], d] = words[at + d]
        at += dim
        for d in range(width):
            state[target[i], d] = words[at + d]
    return -1


@numba.njit(nogil=True, cache=True)
def plan_reads(  # type: ignore[no-untyped-def]
    order,
    places,
    per_segment,
    segment_bytes,
    record_bytes,
    align,
    gap,
    longest,
    room,
    starts,
    lengths,
    into,
    spots,
    read_of,
):
    """Plans reads for the records at places[order[0]], places[order[1]], ... (ascending) that fit into `room` bytes.

    Neighbours at most `gap` bytes apart share a read of at most `longest` bytes.  Read r moves lengths[r] bytes from
    starts[r] in the file to into[r] in memory; record j is then at spots[j] and came with read read_of[j].  Returns
    (reads, records).
    """
    reads, used = 0, 0
    for j in range(order.shape[0]):
        place = places[order[j]]
        offset = place // per_segment * segment_bytes + place % per_segment * record_bytes
        low = offset // align * align
        high = (offset + record_bytes + align - 1) // align * align
        last = reads - 1
        if reads > 0 and low - starts[last] - lengths[last] <= gap and high - starts[last] <= longest:
            more = max(0, high - starts[last] - lengths[last])
            if used + more > room:
                return reads, j
            lengths[last] += more
            used += more
        else:
            if used + high - low > room:
                return reads, j
            starts[reads], lengths[reads], into[reads] = low, high - low, used
            used += high - low
            last = reads
            reads += 1
        spots[j] = into[last] + offset - starts[last]
        read_of[j] = last
    return reads, order.shape[0]


@numba.njit(nogil=True, cache=True)
def live_records(words, place, count, record_words, where, rows, numbers):  # type: ignore[no-untyped-def]
    """Finds the live ones among the `count` records from `place` on: their rows and record numbers.

    Returns how many.
    """
    found = 0
    for k in range(count):
        row = np.int64(_word(words, k * record_words))
        if 0 <= row < where.shape[0] and where[row] == -(place + k) - 1:
            rows[found] = row
            numbers[found] = k
            found += 1
    return found


@numba.njit(nogil=True, cache=True)
def count_places(places, per_segment, by, live, emptied):  # type: ignore[no-untyped-def]
    """Adds `by` to the live count of each place's segment.

    `emptied` gets segments that reach zero; returns how many.
    """
    count = 0
    for i in range(places.shape[0]):
        segment = places[i] // per_segment
        live[segment] += by
        if live[segment] == 0:
            emptied[count] = segment
            count += 1
    return count


@numba.njit(nogil=True, cache=True)
def set_on_disk(where, rows, places):  # type: ignore[no-untyped-def]
    """Records that the rows are now on disk."""
    for i in range(rows.shape[0]):
        where[rows[i]] = -places[i] - 1


@numba.njit(nogil=True, cache=True)
def set_in_dram(where, rows, slots):  # type: ignore[no-untyped-def]
    """Records that the rows are now in DRAM."""
    for i in range(rows.shape[0]):
        where[rows[i]] = slots[i] + 1
