"""Rows on disk: a log of records in segments.

Rows that leave DRAM are appended, whatever their numbers.  So a write is one long run, and small records are packed: no
padding to sectors, no read before a write.  The row's previous record is then dead.  When space is short, the segments
with the fewest live records are cleaned: their live records are appended again.  The file stays below 1.5 times the
live records, plus one step of growth.

One thread may read while another writes.  A read uses the places that rows had when it began, and their bytes stay
until it ends: records are never changed, and a segment freed meanwhile is not reused before the read ends
(`RetiredSegments`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from nestpipe.tables.disk import kernels as kernels
from nestpipe.tables.disk.channel import DiskChannel
from nestpipe.tables.disk.file import BLOCK, DiskFile, DiskTierError
from nestpipe.tables.disk.retired_segments import RetiredSegments

SEGMENT_BYTES = 1 << 20
STAGING_BYTES = 4 << 20
FULLNESS = 2 / 3
"""Above this share of live records the file grows; below it, segments are cleaned instead."""
GROWTH = 8
"""The file grows by an eighth."""
GAP_BYTES = 4096
"""Records this close share a read: 4 kB more cost less than another request."""
LONGEST_READ = 1 << 16
_LEAST_SEGMENTS = 16


class DiskLog:
    """Appends, reads and releases records by place.  One thread may read while another does everything else.

    A failed `append` or `make_room` leaves all records as they were.
    """

    def __init__(
        self,
        directory: str,
        name: str,
        label: str,
        words: tuple[int, int],
        name_of: Callable[[int], str],
        io: str = "auto",
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """`words`: 32-bit words of a row's values and of its state.  `name_of`: the name of a row in error messages."""
        self._words = words
        self._name_of = name_of
        self.record_words = kernels.HEADER_WORDS + (sum(words) + 1) // 2 * 2
        self.record_bytes = 4 * self.record_words
        self.segment_bytes = -(-max(segment_bytes, self.record_bytes) // BLOCK) * BLOCK
        self.per_segment = self.segment_bytes // self.record_bytes
        # Alignment may add up to a block at either end of a record's read.
        self._staging_bytes = max(STAGING_BYTES, self.segment_bytes, self.record_bytes + 2 * BLOCK)
        self._staging_bytes = -(-self._staging_bytes // BLOCK) * BLOCK
        self.file = DiskFile(directory, name, label)
        self._reading = DiskChannel(self.file, self._staging_bytes, io)
        self._writing = DiskChannel(self.file, 2 * self.segment_bytes, io)
        self.io = self._reading.io
        self._staging = self._reading.memory.view(np.uint32)
        """Where `read` puts what it reads."""
        words_per_segment = self.segment_bytes // 4
        memory = self._writing.memory.view(np.uint32)
        self._segment, self._cleaned = memory[:words_per_segment], memory[words_per_segment:]
        """The open segment as it is on disk, and a segment that is being cleaned."""
        self.moving = threading.Lock()
        """Held while rows change places, and while a read looks up its places and begins."""
        self._retired = RetiredSegments()
        self._live = np.zeros(0, np.int64)
        self._closed = np.zeros(0, np.bool_)
        self._generations = np.zeros(0, np.int64)
        self._free: list[int] = []
        self._open = -1
        self._filled = self.per_segment
        """Records in the open segment."""
        self.live = 0
        """Rows on disk."""
        self.rows_read = 0
        self.rows_written = 0
        self.rows_moved = 0
        """Rows moved by cleaning; not counted in `rows_written`."""

    def make_room(self, count: int, where: np.ndarray) -> None:
        """Makes space to append `count` records.  Cleaning may move rows; it reads and updates `where`."""
        needed = -(-max(0, count - (self.per_segment - self._filled)) // self.per_segment)
        needed += 1  # one stays free for the next cleaning to write to
        self._free += self._retired.reclaim()
        while len(self._free) + len(
            self._retired
        ) < needed and self.live < FULLNESS * self.per_segment * np.count_nonzero(self._closed):
            self.clean(int(np.argmin(np.where(self._closed, self._live, self.per_segment + 1))), where)
        if len(self._free) < needed:
            self._grow(needed - len(self._free))

    def append(self, rows: np.ndarray, index: np.ndarray, values: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Writes rows[i] with values[index[i]] and state[index[i]].  Returns their places."""
        places = np.empty(len(rows), np.int64)
        done = 0
        try:
            while done < len(rows):
                if self._filled == self.per_segment:
                    self._open_segment()
                count = min(len(rows) - done, self.per_segment - self._filled)
                end = done + count
                place = self._open * self.per_segment + self._filled
                kernels.encode(
                    self._segment,
                    self._filled,
                    place,
                    self._generations[self._open],
                    self.record_words,
                    rows[done:end],
                    index[done:end],
                    as_words(values),
                    as_words(state),
                )
                # The first block may also hold older records, which are written again unchanged.
                start = self._filled * self.record_bytes // BLOCK * BLOCK
                stop = -(-(self._filled + count) * self.record_bytes // BLOCK) * BLOCK
                offset = self._open * self.segment_bytes + start
                self._writing.move_run(True, offset, stop - start, start)
                places[done:end] = np.arange(place, place + count)
                kernels.count_places(places[done:end], self.per_segment, 1, self._live, np.empty(0, np.int64))
                self.live += count
                self._filled += count
                done = end
        except OSError:
            self.release(places[:done])
            raise
        self.rows_written += len(rows)
        return places

    def begin_read(self) -> None:
        """Call under `moving`, after looking up places: they may be read until `end_read`."""
        self._retired.begin_read()

    def end_read(self) -> None:
        self._retired.end_read()

    def read(
        self, places: np.ndarray, rows: np.ndarray, index: np.ndarray, values: np.ndarray, state: np.ndarray
    ) -> None:
        """Reads rows[i] from places[i] into values[index[i]] and state[index[i]].  DiskTierError for a wrong record."""
        order = np.argsort(places)
        size = len(places)
        starts, lengths, into = np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.int64)
        spots, read_of = np.empty(size, np.int64), np.empty(size, np.int64)
        done = 0
        while done < size:
            reads, records = kernels.plan_reads(
                order[done:],
                places,
                self.per_segment,
                self.segment_bytes,
                self.record_bytes,
                self.file.align,
                GAP_BYTES,
                LONGEST_READ,
                self._staging_bytes,
                starts,
                lengths,
                into,
                spots,
                read_of,
            )
            moved = self._reading.move(False, starts[:reads], lengths[:reads], into[:reads])
            part = order[done : done + records]
            for r in np.flatnonzero(moved != lengths[:reads])[:1]:
                i = part[np.searchsorted(read_of[:records], r)]
                raise self.file.short(self._name_of(int(rows[i])), int(starts[r]), int(lengths[r]), int(moved[r]))
            self._decode(self._staging, spots[:records], part, rows, places, index, values, state)
            done += records
        self.rows_read += size

    def release(self, places: np.ndarray) -> None:
        """Declares the records at these places dead.  Under `moving`, together with the change of `where`."""
        emptied = np.empty(len(places), np.int64)
        count = kernels.count_places(places, self.per_segment, -1, self._live, emptied)
        self.live -= len(places)
        for segment in emptied[:count].tolist():
            if self._closed[segment]:
                self._free_segment(segment)

    def nbytes(self) -> int:
        """Bytes of DRAM: buffers, and 17 bytes per segment."""
        buffers = self._reading.memory.nbytes + self._writing.memory.nbytes
        return buffers + self._live.nbytes + self._closed.nbytes + self._generations.nbytes

    def close(self) -> None:
        self._reading.close()
        self._writing.close()
        self.file.close()

    def _decode(
        self,
        words: np.ndarray,
        spots: np.ndarray,
        order: np.ndarray,
        rows: np.ndarray,
        places: np.ndarray,
        index: np.ndarray,
        values: np.ndarray,
        state: np.ndarray,
    ) -> None:
        wrong = kernels.decode(
            words,
            spots,
            order,
            rows,
            places,
            self._generations,
            self.per_segment,
            self.record_words,
            index,
            as_words(values),
            as_words(state),
        )
        if wrong >= 0:
            raise self._corrupt(self._name_of(int(rows[wrong])), int(places[wrong]))

    def clean(self, segment: int, where: np.ndarray) -> None:
        """Moves the live records of a segment to the end of the log."""
        place = segment * self.per_segment
        assert self._closed[segment] and self._live[segment] > 0, segment
        length = -(-self.per_segment * self.record_bytes // self.file.align) * self.file.align
        self._writing.move_run(False, segment * self.segment_bytes, length, self.segment_bytes)
        rows, numbers = np.empty(self.per_segment, np.int64), np.empty(self.per_segment, np.int64)
        count = kernels.live_records(self._cleaned, place, self.per_segment, self.record_words, where, rows, numbers)
        if count != self._live[segment]:  # a damaged row number: its row would be lost silently
            raise self._corrupt(f"one of {self._live[segment]} rows", place)
        rows, numbers, each = rows[:count], numbers[:count], np.arange(count)
        values, state = (np.empty((count, width), np.uint32) for width in self._words)
        self._decode(self._cleaned, numbers * self.record_bytes, each, rows, place + numbers, each, values, state)
        places = self.append(rows, each, values, state)
        self.rows_written -= count
        self.rows_moved += count
        with self.moving:
            kernels.set_on_disk(where, rows, places)
            self.release(place + numbers)

    def _open_segment(self) -> None:
        self._free += self._retired.reclaim()
        if not self._free:
            self._grow(1)
        if self._open >= 0:
            self._closed[self._open] = True
            if self._live[self._open] == 0:
                self._free_segment(self._open)
        self._open = self._free.pop()
        self._filled = 0
        self._generations[self._open] += 1

    def _free_segment(self, segment: int) -> None:
        self._closed[segment] = False
        self._retired.retire(segment)
        self._free += self._retired.reclaim()

    def _grow(self, least: int) -> None:
        """Gets `least` free segments: new ones, or on a full disk retired ones once the current read has ended."""
        try:
            self._lengthen(least)
        except DiskTierError:
            self._retired.wait_for_read()
            freed = self._retired.reclaim()
            self._free += freed
            if len(freed) < least:
                raise

    def _lengthen(self, least: int) -> None:
        have = len(self._live)
        step = max(least, have // GROWTH, _LEAST_SEGMENTS)
        got = self.file.grow(step * self.segment_bytes, least * self.segment_bytes) // self.segment_bytes
        self._live = np.concatenate([self._live, np.zeros(got, np.int64)])
        self._closed = np.concatenate([self._closed, np.zeros(got, np.bool_)])
        self._generations = np.concatenate([self._generations, np.zeros(got, np.int64)])
        self._free.extend(range(have + got - 1, have - 1, -1))

    def _corrupt(self, what: str, place: int) -> DiskTierError:
        offset = place // self.per_segment * self.segment_bytes + place % self.per_segment * self.record_bytes
        return DiskTierError(
            f"{self.file.path} ({self.file.label}): {what}: the {self.record_bytes} bytes at {offset} are not what was written "
            "(checksum): something else wrote there or the disk is failing; restart from a checkpoint"
        )


def as_words(rows: np.ndarray) -> np.ndarray:
    """Rows [n, D] of any dtype as 32-bit words."""
    return rows.view(np.uint32)
