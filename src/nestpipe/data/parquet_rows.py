"""Rows of Parquet files by unit, in the order of the files or shuffled, for a source to make samples of.  Unit = row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from nestpipe.data.row_groups import Decoded, RowGroup, RowGroups
from nestpipe.data.shuffle import Shuffle
from nestpipe.data.source import split_interval
from nestpipe.data.stream import sample_ends
from nestpipe.files.location import Location


@dataclass(frozen=True)
class Part:
    """Rows of one row group, with their numbers in the file."""

    rows: pa.RecordBatch
    group: RowGroup
    numbers: np.ndarray

    def place(self, row: int) -> str:
        """Where a row of this part stands, for an error."""
        return f"{self.group.path} row {self.numbers[row]} (the first is 0)"


@dataclass(frozen=True)
class Rows:
    """Some units' rows.  The types of a column may differ between parts, as they may between files."""

    parts: list[Part]
    places: np.ndarray | None
    """The order of the samples: places among the rows of all parts one after another; None: as they stand."""
    ends: np.ndarray
    """Of each sample, in that order, the unit after it."""


class ParquetRows:
    """The rows of one split of some files.  `shuffle`: samples in a block that is shuffled (`Shuffle`); 0: no shuffling.

    What a source needs of it: `extent`, `piece`, `skipped` and `read`, which may be called by several threads.  With `skip`, a
    part that cannot be read keeps its units and has no rows (`RowGroups`).
    """

    def __init__(
        self,
        files: list[Location],
        columns: list[str],
        check: Callable[[str, pa.Schema], None],
        split: str = "train",
        eval_fraction: float = 0.0,
        *,
        skip: bool = False,
        shuffle: int = 0,
        seed: int = 0,
    ) -> None:
        self._found = RowGroups(files, columns, check, skip)
        self._first, self._last = split_interval(self._found.rows, split, eval_fraction)
        groups = self._found.groups
        self.groups = [group for group in groups if group.first < self._last and group.last > self._first]
        """Those that have rows of this split."""
        self.skipped = self._found.skipped
        self.extent = self._last - self._first
        self.piece = max((group.last - group.first for group in groups), default=1)
        self._shuffle: Shuffle | None = None
        if shuffle:
            self._shuffle = Shuffle([self._samples(group) for group in self.groups], shuffle, seed)
            self.piece = self._shuffle.piece
        self._starts = np.array([group.first for group in self.groups], np.int64)

    def read(self, start: int, stop: int, epoch: int) -> Iterator[Rows]:
        """The rows of units start..stop of an epoch: some thousand at a time in order, a block at a time shuffled."""
        if start >= stop:
            return iter(())
        if self._shuffle is not None:
            return self._shuffled(self._shuffle, start, stop, epoch)
        return self._in_order(self._first + start, self._first + stop)

    def _in_order(self, low: int, high: int) -> Iterator[Rows]:
        at = int(np.searchsorted(self._starts, low, side="right")) - 1
        while at < len(self.groups) and self.groups[at].first < high:
            group = self.groups[at]
            for decoded in self._decode(group):
                rows, first = decoded
                start, stop = max(low, first), min(high, first + rows.num_rows)
                if start < stop:
                    part = _part(group, decoded, np.arange(start, stop))
                    yield Rows([part], None, sample_ends(start - self._first, stop - start))
                if first + rows.num_rows >= high:
                    return
            at += 1

    def _shuffled(self, shuffle: Shuffle, start: int, stop: int, epoch: int) -> Iterator[Rows]:
        """A group that goes on in the next block is kept for it; otherwise nothing of a block outlives it."""
        kept: dict[int, list[Decoded]] = {}
        for pick in shuffle.picks(start, stop, epoch):
            parts: list[Part] = []
            there = []
            for number, wanted in zip(pick.groups, pick.rows):
                group = self.groups[number]
                decoded = kept.pop(number) if number in kept else list(self._decode(group))
                there.append(bool(decoded))
                parts += _take(group, decoded, wanted + max(group.first, self._first))
                if number == pick.goes_on:
                    kept[number] = decoded
            yield Rows(parts, *pick.order(there))
            del parts

    def _decode(self, group: RowGroup) -> Iterator[Decoded]:
        return self._found.decode(group, self._samples(group))

    def _samples(self, group: RowGroup) -> int:
        """Rows of the group that belong to this split."""
        return min(group.last, self._last) - max(group.first, self._first)


def _take(group: RowGroup, decoded: list[Decoded], wanted: np.ndarray) -> list[Part]:
    """The rows with the numbers `wanted`, ascending, of a group."""
    found = []
    for rows, first in decoded:
        start, stop = np.searchsorted(wanted, [first, first + rows.num_rows])
        if start < stop:
            found.append(_part(group, (rows, first), wanted[start:stop]))
    return found


def _part(group: RowGroup, decoded: Decoded, wanted: np.ndarray) -> Part:
    rows, first = decoded
    low, count = int(wanted[0]) - first, len(wanted)
    if int(wanted[-1]) - first - low + 1 == count:
        rows = rows.slice(low, count)
    else:
        rows = rows.take(pa.array(wanted - first))
    return Part(rows, group, wanted - group.file_first)
