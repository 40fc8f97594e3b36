"""Scores of a whole data set, batch by batch, into one Parquet file that appears complete, or not at all."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from nestpipe.checkpoint.manifest import sync_directory
from nestpipe.config.recipe import Recipe
from nestpipe.data.batch import Batch
from nestpipe.data.source import DataError, Source
from nestpipe.data.stream import Stream
from nestpipe.infer.open_run import OpenModel
from nestpipe.infer.scoring import check_queries, item_vectors, ranks_items

GROUP_ROWS = 1 << 16
"""Rows of a Parquet row group, at least but for the last: held in memory."""


@dataclass(frozen=True)
class Predicted:
    rows: int
    seconds: float


def with_data(recipe: Recipe, path: str) -> Recipe:
    """The recipe with other data, all of which its evaluation split then is, where its kind has a split by files."""
    names = {field.name for field in fields(recipe.data)}
    changed: dict[str, Any] = {name: path for name in ("paths", "eval_paths", "path") if name in names}
    if not changed:
        raise DataError(f"--data: data.kind {recipe.data_kind!r} reads no files: leave it out")
    return replace(recipe, data=replace(recipe.data, **changed))


def scores_of(opened: OpenModel, source: Source, batch_size: int, top: int) -> Iterator[tuple[pa.RecordBatch, float]]:
    """Scores of all samples in their order, and the fraction done.  A row has its number, counted from 0.

    Items: the `top` best of the catalogue that the history does not have, best first, and their scores.  Of equal ones the
    smaller id comes first.
    """
    stream = Stream(source, batch_size)
    score = _Items(opened, source, top) if ranks_items(opened.model, source) else _Clicks(opened)
    at = 0
    with contextlib.closing(stream):
        for batch in stream:
            if len(batch):
                numbers = pa.array(np.arange(at, at + len(batch)))
                yield pa.record_batch({"row": numbers, **score.columns(batch)}), stream.fraction()
                at += len(batch)


class _Clicks:
    def __init__(self, opened: OpenModel) -> None:
        self._opened = opened

    def columns(self, batch: Batch) -> dict[str, pa.Array]:
        logits = self._opened.outputs(batch)
        if not isinstance(logits, Tensor) or logits.shape != (len(batch),):
            got = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise ValueError(
                f"to predict, the model must return one logit for each sample beside its loss, not {got}; to rank items it "
                "needs an attribute table"
            )
        found = {"probability": pa.array(logits.sigmoid().float().numpy()), "logit": pa.array(logits.float().numpy())}
        if batch.labels is not None:
            found["label"] = pa.array(batch.labels.float().numpy())
        return found


class _Items:
    def __init__(self, opened: OpenModel, source: Source, top: int) -> None:
        self._opened = opened
        self._catalogue: np.ndarray = source.catalogue  # type: ignore[attr-defined]
        self._top = min(top, len(self._catalogue))
        rows = torch.from_numpy(opened.rows.read(opened.model.table, self._catalogue))
        self._items = item_vectors(opened.model, rows)

    def columns(self, batch: Batch) -> dict[str, pa.Array]:
        queries = self._opened.outputs(batch)
        check_queries(batch, queries, self._items)
        scores = queries.to(self._items) @ self._items.T
        history = batch.sparse_features["history"]
        places = np.searchsorted(self._catalogue, history.values().numpy()).clip(max=len(self._catalogue) - 1)
        known = self._catalogue[places] == history.values().numpy()
        user = torch.repeat_interleave(torch.arange(len(batch)), history.lengths()).numpy()
        scores[user[known], places[known]] = -torch.inf
        order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, : self._top]
        best = scores.gather(1, order).float().numpy()
        items = self._catalogue[order.numpy()]
        # A catalogue that is nearly all in the history leaves fewer.
        kept = best > -np.inf
        offsets = pa.array(np.concatenate([[0], np.cumsum(kept.sum(axis=1))]), pa.int32())
        return {
            "items": pa.ListArray.from_arrays(offsets, pa.array(items[kept])),
            "scores": pa.ListArray.from_arrays(offsets, pa.array(best[kept])),
        }


def predict_to(
    opened: OpenModel,
    source: Source,
    to: Path,
    *,
    batch_size: int,
    top: int = 10,
    on_progress: Callable[[float, int], None] = lambda done, rows: None,
) -> Predicted:
    """Writes the scores of all samples of a source.  Any end but the good one leaves no file, and one that was there as it was.

    `on_progress` gets the fraction done and the rows so far.
    """
    started = time.perf_counter()
    temporary = to.with_name(f".{to.name}.{os.getpid()}")
    count = 0
    try:
        writer: pq.ParquetWriter | None = None
        held: list[pa.RecordBatch] = []
        with contextlib.ExitStack() as stack:
            for part, done in scores_of(opened, source, batch_size, top):
                if writer is None:
                    writer = stack.enter_context(pq.ParquetWriter(temporary, part.schema))
                held.append(part)
                count += part.num_rows
                if sum(one.num_rows for one in held) >= GROUP_ROWS:
                    writer.write_table(pa.Table.from_batches(held))
                    held = []
                on_progress(done, count)
            if writer is None:
                raise DataError("the data has no samples to predict: look at --data, or at the recipe's [data]")
            if held:
                writer.write_table(pa.Table.from_batches(held))
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(to)
        sync_directory(to.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return Predicted(count, time.perf_counter() - started)
