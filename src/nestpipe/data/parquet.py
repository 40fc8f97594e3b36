"""Parquet files whose columns a recipe maps to features, dense inputs and the label."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nestpipe.data.batch import Batch
from nestpipe.data.checks import check_fraction, check_split, check_text, check_texts
from nestpipe.data.parquet_columns import BadRow, Mapped, build_batch, check_schema
from nestpipe.data.paths import find_files
from nestpipe.data.skipped import Skipped
from nestpipe.data.source import DataError, split_interval
from nestpipe.files import Location

CHUNK = 8192
"""Rows decoded at a time."""


@dataclass(frozen=True)
class ParquetData:
    """Rows of Parquet files in their order.  `parquet_columns` says what becomes of each type, of nulls and of NaN."""

    paths: str | Sequence[str] = ()
    """Files, globs or folders (of *.parquet, at any depth); local, or s3://, gs:// and hdfs://."""
    sparse: Mapping[str, str] = field(default_factory=dict)
    """Feature to column."""
    label: str = ""
    """Column of the label, 0 or 1."""
    dense: Sequence[str] = ()
    """Columns of the dense inputs."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """Feature to column of per-sample weights.  If any feature has weights, the ids of the others weigh 1."""
    eval_paths: str | Sequence[str] = ()
    """What to evaluate on; without it, the last `eval_fraction` of the rows of `paths`, which train leaves out."""
    eval_fraction: float = 0.1
    """Share of the samples that is held out."""
    on_error: Literal["fail", "skip"] = "fail"
    """What to do with a file or row group that cannot be read: end the run, or leave it out as a whole and say so.  A value
    that cannot be trained on ends the run in any case."""

    def __post_init__(self) -> None:
        check_texts("paths", self.paths, "clicks/*.parquet")
        if not isinstance(self.sparse, Mapping) or not self.sparse:
            raise ValueError(f"data.sparse must map features to columns, {{ item = 'item_id' }}, not {self.sparse!r}")
        for feature, column in self.sparse.items():
            check_text(f"sparse.{feature}", column, "item_id")
        check_text("label", self.label, "clicked")
        if isinstance(self.dense, str):
            raise ValueError(f"data.dense must be a list of columns, not {self.dense!r}")
        check_texts("dense", self.dense, "price", empty=True)
        if not isinstance(self.weights, Mapping):
            raise ValueError(f"data.weights must map features to columns, not {self.weights!r}")
        for feature, column in self.weights.items():
            check_text(f"weights.{feature}", column, "item_weight")
            if feature not in self.sparse:
                raise ValueError(f"data.weights.{feature}: data.sparse has no feature {feature!r}")
        check_texts("eval_paths", self.eval_paths or (), "eval.parquet", empty=True)
        check_fraction("eval_fraction", self.eval_fraction)
        if self.on_error not in ("fail", "skip"):
            raise ValueError(f"data.on_error must be 'fail' or 'skip', not {self.on_error!r}")

    def open(self, split: str, seed: int) -> ParquetSource:
        """The seed changes nothing: rows are read in order."""
        check_split(split)
        mapped = Mapped(dict(self.sparse), list(self.dense), self.label, dict(self.weights))
        if self.eval_paths:
            name = "paths" if split == "train" else "eval_paths"
            return ParquetSource(find_files(name, getattr(self, name), "*.parquet"), mapped, skip=self._skips)
        files = find_files("paths", self.paths, "*.parquet")
        return ParquetSource(files, mapped, split, self.eval_fraction, skip=self._skips)

    @property
    def _skips(self) -> bool:
        return self.on_error == "skip"


@dataclass(frozen=True)
class _Group:
    """One row group: rows first..last of all files, number `number` of its file, whose rows begin at `file_first`."""

    path: Location
    number: int
    first: int
    last: int
    file_first: int

    def __str__(self) -> str:
        return f"{self.path} row group {self.number}"


class ParquetSource:
    """Unit = sample (row).  Only mapped columns and needed row groups are read; files are opened when they are needed.

    A file of no bytes counts as one of no rows: it is what some writers leave for an empty partition.  With `skip`, so does
    a file whose footer cannot be read; a row group that cannot be decoded to its end keeps its units, and has no samples.
    """

    def __init__(
        self,
        files: list[Location],
        mapped: Mapped,
        split: str = "train",
        eval_fraction: float = 0.0,
        skip: bool = False,
    ) -> None:
        self.files = files
        self.skipped = Skipped() if skip else None
        self.features = list(mapped.sparse)
        self.dense_features = len(mapped.dense)
        self._mapped = mapped
        self._groups: list[_Group] = []
        rows = 0
        for path in files:
            rows = self._add(path, rows)
        self._first, last = split_interval(rows, split, eval_fraction)
        self.extent = last - self._first
        self._starts = np.array([group.first for group in self._groups], np.int64)
        self.piece = max((group.last - group.first for group in self._groups), default=1)

    def _add(self, path: Location, first: int) -> int:
        """Notes the row groups of a file whose rows begin at `first`; returns where those of the next file begin."""
        try:
            if path.size() == 0:
                return first
            with _opened(path) as file:
                metadata, schema = file.metadata, file.schema_arrow
                rows = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        except (OSError, pa.ArrowException) as error:
            if self.skipped is not None:
                self.skipped.add(str(path), 0, f"it cannot be read as Parquet: {_line(error)}")
                return first
            raise DataError(f"{path} cannot be read as Parquet: {_line(error)}") from None
        check_schema(str(path), schema, self._mapped)
        file_first = first
        for number, count in enumerate(rows):
            if count:
                self._groups.append(_Group(path, number, first, first + count, file_first))
            first += count
        return first

    def read(self, start: int, stop: int, epoch: int) -> Iterator[tuple[Batch, np.ndarray]]:
        low, high = self._first + start, self._first + stop
        if low >= high:
            return
        at = int(np.searchsorted(self._starts, low, side="right")) - 1
        while at < len(self._groups) and self._groups[at].first < high:
            group = self._groups[at]
            for rows, first in self._rows(group, low, high):
                try:
                    batch = build_batch(rows, self._mapped)
                except BadRow as bad:
                    row = first + bad.row - group.file_first
                    raise DataError(f"{group.path} row {row} (the first is 0): {bad}") from None
                yield batch, np.arange(first + 1, first + rows.num_rows + 1) - self._first
            at += 1

    def _rows(self, group: _Group, low: int, high: int) -> Iterator[tuple[pa.RecordBatch, int]]:
        """The rows low..high of a row group, some thousand at a time, and the number of the first of them."""
        if self.skipped is not None:
            yield from self._rows_if_all(group, low, high, self.skipped)
            return
        try:
            for rows, first in self._decode(group):
                part = _cut(rows, first, low, high)
                if part is not None:
                    yield part
                if first + rows.num_rows >= high:
                    return
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{group} cannot be read: {_line(error)}") from None

    def _rows_if_all(
        self, group: _Group, low: int, high: int, skipped: Skipped
    ) -> Iterator[tuple[pa.RecordBatch, int]]:
        """As `_rows`, when the whole group has been decoded: workers that share it must agree on whether it is good."""
        if str(group) in skipped.parts:
            return
        try:
            everything = list(self._decode(group))
        except (OSError, pa.ArrowException) as error:
            mine = min(group.last, self._first + self.extent) - max(group.first, self._first)
            skipped.add(str(group), mine, f"it cannot be read: {_line(error)}")
            return
        for rows, first in everything:
            part = _cut(rows, first, low, high)
            if part is not None:
                yield part

    def _decode(self, group: _Group) -> Iterator[tuple[pa.RecordBatch, int]]:
        """All rows of a group, some thousand at a time, each with the number of its first."""
        with _opened(group.path) as file:
            first = group.first
            for rows in file.iter_batches(CHUNK, [group.number], self._mapped.columns(), use_threads=False):
                yield rows, first
                first += rows.num_rows


@contextmanager
def _opened(path: Location) -> Iterator[pq.ParquetFile]:
    """On object storage, what is near each other is read by one request."""
    with path.open() as raw, pq.ParquetFile(raw, pre_buffer=path.remote, page_checksum_verification=True) as file:
        yield file


def _cut(rows: pa.RecordBatch, first: int, low: int, high: int) -> tuple[pa.RecordBatch, int] | None:
    """Those of the rows, of which the first has the number `first`, that are in low..high."""
    start, stop = max(low - first, 0), min(high - first, rows.num_rows)
    return (rows.slice(start, stop - start), first + start) if start < stop else None


def _line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
