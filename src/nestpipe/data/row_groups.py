"""The row groups of Parquet files: found in their footers, and decoded one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from nestpipe.data.skipped import Skipped
from nestpipe.data.source import DataError
from nestpipe.files.location import Location

CHUNK = 8192
"""Rows decoded at a time."""

Decoded = tuple[pa.RecordBatch, int]
"""Some rows of a group, and the number of the first of them among the rows of all files."""


@dataclass(frozen=True)
class RowGroup:
    """Rows first..last of all files, number `number` of its file, whose rows begin at `file_first`."""

    path: Location
    number: int
    first: int
    last: int
    file_first: int

    def __str__(self) -> str:
        return f"{self.path} row group {self.number}"


class RowGroups:
    """The row groups that have rows, in the order of `files`.  Only `columns` are decoded; files are opened when needed.

    `check(path, schema)` refuses a file with the wrong columns.  A file of no bytes counts as one of no rows: it is what some
    writers leave for an empty partition.  With `skip`, so does a file whose footer cannot be read, and a row group that cannot be
    decoded to its end has no rows, either; `skipped` notes both.
    """

    def __init__(
        self, files: list[Location], columns: list[str], check: Callable[[str, pa.Schema], None], skip: bool = False
    ) -> None:
        self.skipped = Skipped() if skip else None
        self.groups: list[RowGroup] = []
        self.rows = 0
        """In all files."""
        self._columns = columns
        self._check = check
        for path in files:
            self._add(path)

    def _add(self, path: Location) -> None:
        """Notes the row groups of one more file."""
        try:
            if path.size() == 0:
                return
            with opened(path) as file:
                metadata, schema = file.metadata, file.schema_arrow
                rows = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        except (OSError, pa.ArrowException) as error:
            if self.skipped is not None:
                self.skipped.add(str(path), 0, f"it cannot be read as Parquet: {_line(error)}")
                return
            raise DataError(f"{path} cannot be read as Parquet: {_line(error)}") from None
        self._check(str(path), schema)
        file_first = self.rows
        for number, count in enumerate(rows):
            if count:
                self.groups.append(RowGroup(path, number, self.rows, self.rows + count, file_first))
            self.rows += count

    def decode(self, group: RowGroup, samples: int) -> Iterator[Decoded]:
        """All rows of a group, some thousand at a time.  `samples`: how many it would have had, if it is skipped.

        With `skip`, the first rows come when the last one is decoded: workers that share the group must agree on whether it
        is good.
        """
        if self.skipped is None:
            try:
                yield from self._decode(group)
            except (OSError, pa.ArrowException) as error:
                raise DataError(f"{group} cannot be read: {_line(error)}") from None
        elif str(group) not in self.skipped.parts:
            try:
                everything = list(self._decode(group))
            except (OSError, pa.ArrowException) as error:
                self.skipped.add(str(group), samples, f"it cannot be read: {_line(error)}")
                return
            yield from everything

    def _decode(self, group: RowGroup) -> Iterator[Decoded]:
        with opened(group.path) as file:
            first = group.first
            for rows in file.iter_batches(CHUNK, [group.number], self._columns, use_threads=False):
                yield rows, first
                first += rows.num_rows


@contextmanager
def opened(path: Location) -> Iterator[pq.ParquetFile]:
    """On object storage, what is near each other is read by one request."""
    with path.open() as raw, pq.ParquetFile(raw, pre_buffer=path.remote, page_checksum_verification=True) as file:
        yield file


def _line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
