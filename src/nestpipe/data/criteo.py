"""Criteo's click logs as text: a label, 13 integers and 26 hexadecimal ids; all but the label may be missing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nestpipe.data.batch import Batch
from nestpipe.data.checks import check_fraction, check_split, check_texts
from nestpipe.data.criteo_kernels import BAD_COLUMNS, BAD_ID, BAD_LABEL, COLUMNS, by_feature, parse_lines
from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.data.paths import find_files
from nestpipe.data.source import DataError, split_interval
from nestpipe.files import Location

BLOCK = 1 << 20
"""Bytes parsed at a time: some 4,000 samples.  A line is never longer."""
PACKED = (b"\x1f\x8b", b"PK\x03\x04", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")


@dataclass(frozen=True)
class CriteoData:
    """Criteo text files, read in their order.  Features C1..C26, dense log(1 + max(x, 0)).

    A missing integer is 0, a missing id an empty bag; the key of an id is its 32-bit value.
    """

    paths: str | Sequence[str] = ()
    """Files, globs or folders; local, or s3://, gs:// and hdfs://."""
    eval_paths: str | Sequence[str] = ()
    """What to evaluate on; without it, the last `eval_fraction` of the bytes of `paths`, which train leaves out."""
    eval_fraction: float = 0.1
    """Share of the samples that is held out."""

    def __post_init__(self) -> None:
        check_texts("paths", self.paths, "day_*")
        check_texts("eval_paths", self.eval_paths or (), "day_23", empty=True)
        check_fraction("eval_fraction", self.eval_fraction)

    def open(self, split: str, seed: int) -> CriteoSource:
        """The seed changes nothing: files are read in order."""
        check_split(split)
        if self.eval_paths:
            field = "paths" if split == "train" else "eval_paths"
            return CriteoSource(find_files(field, getattr(self, field), "*"))
        return CriteoSource(find_files("paths", self.paths, "*"), split, self.eval_fraction)


class CriteoSource:
    """Unit = byte of the files one after another; a line belongs to the interval in which it begins."""

    def __init__(self, files: list[Location], split: str = "train", eval_fraction: float = 0.0) -> None:
        self.files = files
        self.features = [f"C{c}" for c in range(1, 27)]
        self.dense_features = 13
        self.piece = 4 * BLOCK
        self._sizes = [_size(path) for path in files]
        self._first, last = split_interval(sum(self._sizes), split, eval_fraction)
        self.extent = last - self._first

    def read(self, start: int, stop: int, epoch: int) -> Iterator[tuple[Batch, np.ndarray]]:
        before = -self._first  # the unit at which the file begins
        for path, size in zip(self.files, self._sizes):
            low, high = max(start - before, 0), min(stop - before, size)
            if low < high:
                try:
                    with path.open() as file:
                        for batch, ends in self._read_file(path, file, size, low, high):
                            yield batch, ends + before
                except OSError as error:
                    raise DataError(f"cannot read {path}: {_why(error)}") from None
            before += size

    def _read_file(
        self, path: Location, file: Any, size: int, start: int, stop: int
    ) -> Iterator[tuple[Batch, np.ndarray]]:
        at = start
        if start > 0:  # the line that holds the byte before `start` belongs to what came before
            file.seek(start - 1)
            block = file.read(BLOCK)
            at = start - 1 + (block.find(b"\n") + 1 or len(block))
        while at < stop:
            file.seek(at)
            block = np.frombuffer(file.read(BLOCK), np.uint8)
            if not len(block):
                raise DataError(f"{path} was cut off while it was read")
            ends, labels, dense, ids, bad = parse_lines(block, stop - at, at + len(block) >= size)
            if bad[0]:
                raise DataError(_explain(path, at, block, bad))
            if not len(ends):
                raise DataError(f"{path} line {_line_number(path, at)}: longer than {BLOCK} bytes")
            yield self._batch(labels, dense, ids), at + ends
            at += int(ends[-1])

    def _batch(self, labels: np.ndarray, dense: np.ndarray, ids: np.ndarray) -> Batch:
        lengths, values = (torch.from_numpy(array) for array in by_feature(ids))
        sparse = KeyedJaggedTensor(self.features, values, lengths=lengths, stride=len(labels))
        return Batch(sparse, torch.from_numpy(dense), torch.from_numpy(labels))


def _size(path: Location) -> int:
    """Bytes of a readable text file, else DataError."""
    try:
        with path.open() as file:
            start = file.read(8)
        size = path.size()
    except OSError as error:
        raise DataError(f"cannot read {path}: {_why(error)}") from None
    if path.leaf.endswith(".gz") or start.startswith(PACKED):
        raise DataError(f"{path} is compressed: unpack it (gunzip) or convert it to Parquet; text is read by position")
    return size


def _why(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


def _line_number(path: Location, offset: int) -> int:
    """Counted from 1, and only when there is an error to report."""
    newlines = 0
    with path.open() as file:
        while offset > 0 and (block := file.read(min(offset, BLOCK))):
            newlines += block.count(b"\n")
            offset -= len(block)
    return newlines + 1


def _explain(path: Location, at: int, block: np.ndarray, bad: tuple[int, int, int, int, int]) -> str:
    kind, line, column, start, stop = bad
    where = f"{path} line {_line_number(path, at + line)}"
    if kind == BAD_COLUMNS:
        return f"{where}: {column} columns where Criteo has {COLUMNS}"
    text = block[start:stop].tobytes()[:40].decode("utf-8", "replace")
    what = {BAD_LABEL: "a label (0 or 1)", BAD_ID: "a hex id"}.get(kind, "an integer")
    return f"{where} column {column}: {text!r} is not {what}"
