"""Parquet files whose columns a recipe maps to features, dense inputs and the label."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from nestpipe.data.batch import Batch
from nestpipe.data.checks import check_fraction, check_split, check_text, check_texts, check_whole
from nestpipe.data.parquet_columns import BadRow, Mapped, build_batch, check_schema
from nestpipe.data.parquet_rows import ParquetRows, Part
from nestpipe.data.paths import find_files
from nestpipe.data.row_groups import CHUNK, opened
from nestpipe.data.source import DataError


@dataclass(frozen=True)
class ParquetData:
    """Rows of Parquet files, in their order or shuffled.  `parquet_columns` says what becomes of types, nulls and NaN."""

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
    shuffle: int = 0
    """Samples in a block that is shuffled for training, after row groups were; another order in every epoch.  0 = file order.
    A block is in memory, and reads the row groups it touches whole: a few row groups' worth is good."""

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
        check_whole("shuffle", self.shuffle, 0)

    def open(self, split: str, seed: int) -> ParquetSource:
        """The seed decides how training data is shuffled; without `shuffle` it changes nothing."""
        return self._open(split, seed, self.label)

    def open_to_score(self, seed: int) -> ParquetSource:
        """As `open("eval", seed)`, of files that may have no label: none of them, or all."""
        name = "eval_paths" if self.eval_paths else "paths"
        files = find_files(name, getattr(self, name), "*.parquet")
        with opened(files[0]) as file:
            labelled = self.label in file.schema_arrow.names
        return self._open("eval", seed, self.label if labelled else None)

    def _open(self, split: str, seed: int, label: str | None) -> ParquetSource:
        check_split(split)
        mapped = Mapped(dict(self.sparse), list(self.dense), label, dict(self.weights))
        name, fraction = "paths", self.eval_fraction
        if self.eval_paths:
            name, fraction = ("paths" if split == "train" else "eval_paths"), 0.0
        rows = ParquetRows(
            find_files(name, getattr(self, name), "*.parquet"),
            mapped.columns(),
            lambda path, schema: check_schema(path, schema, mapped),
            "train" if self.eval_paths else split,
            fraction,
            skip=self.on_error == "skip",
            shuffle=self.shuffle if split == "train" else 0,
            seed=seed,
        )
        return ParquetSource(rows, mapped)


class ParquetSource:
    """Unit = sample (row).  Only mapped columns and needed row groups are read."""

    def __init__(self, rows: ParquetRows, mapped: Mapped) -> None:
        self.features = list(mapped.sparse)
        self.dense_features = len(mapped.dense)
        self.extent, self.piece, self.skipped = rows.extent, rows.piece, rows.skipped
        self._rows = rows
        self._mapped = mapped

    def read(self, start: int, stop: int, epoch: int) -> Iterator[tuple[Batch, np.ndarray]]:
        for rows in self._rows.read(start, stop, epoch):
            if not len(rows.ends):
                continue
            batch = Batch.concat([self._build(part) for part in rows.parts])
            places, ends = rows.places, rows.ends
            del rows  # a block is in memory twice at most
            if places is None:
                yield batch, ends
                continue
            for at in range(0, len(ends), CHUNK):
                yield batch.select(torch.from_numpy(places[at : at + CHUNK])), ends[at : at + CHUNK]
            del batch

    def _build(self, part: Part) -> Batch:
        try:
            return build_batch(part.rows, self._mapped)
        except BadRow as bad:
            raise DataError(f"{part.place(bad.row)}: {bad}") from None
