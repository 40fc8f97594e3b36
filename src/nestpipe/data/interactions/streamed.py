"""Histories that are larger than memory: read from the cache block by block, in an order of each epoch's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from nestpipe.data.batch import Batch
from nestpipe.data.counter import derive
from nestpipe.data.interactions.histories import Reading, cached_block
from nestpipe.data.negatives import Negatives, Sampler, chances_of
from nestpipe.data.parquet_rows import ParquetRows
from nestpipe.data.pool import CataloguePool, Pool
from nestpipe.data.sequence_batches import CHUNK, FEATURES, build_batch
from nestpipe.files.location import Location


class StreamedSequences:
    """As `SequenceSource`, of histories in files.  Unit = user: one whose history is too short has no sample.

    Train is shuffled in blocks of `shuffle` users (`Shuffle`), which are in memory at a time; eval is in the order of users.
    """

    dense_features = 0

    def __init__(
        self,
        files: Sequence[Path],
        reading: Reading,
        catalogue: np.ndarray,
        split: str,
        seed: int,
        max_length: int,
        negatives: Negatives,
        shuffle: int,
        events: np.ndarray,
    ) -> None:
        """`events`: how often each item of the catalogue occurs in the log, held-out events included."""
        self.catalogue = catalogue
        self.statistics: dict[str, Any] = {}
        self.digest: str | None = None
        columns = list(pq.read_schema(files[0]).names)
        known = ["action"] if "action" in columns else []
        self.features = [*FEATURES, *known, *reading.features]
        self._train = split == "train"
        self._rows = ParquetRows(
            [Location(str(file)) for file in files],
            columns,
            lambda path, schema: None,
            shuffle=shuffle if self._train else 0,
            seed=seed,
        )
        self.extent, self.piece = self._rows.extent, self._rows.piece
        self._reading, self._split, self._seed = reading, split, seed
        self._max_length, self.negatives = max_length, negatives
        self.sampler = Sampler.of(catalogue, chances_of(negatives.sampling, events) if self._train else None)
        pooled = self._train and negatives.drawn_for == "pool"
        self.pool: Pool | None = CataloguePool(self.sampler, negatives.number, seed) if pooled else None
        """Negatives of whole batches; None where each target has its own."""
        self._each = negatives.number if self._train and not pooled else 0

    @property
    def longest(self) -> int:
        """Of the histories in batches, of either split."""
        return min(self._max_length, self.statistics["lengths"]["most"] - 1)

    def read(self, start: int, stop: int, epoch: int) -> Iterator[tuple[Batch, np.ndarray]]:
        key = derive(self._seed, "negatives", epoch)
        for rows in self._rows.read(start, stop, epoch):
            if not rows.parts:
                continue
            histories = self._reading.histories([cached_block(part.rows) for part in rows.parts])
            numbers = np.concatenate([part.numbers + part.group.file_first for part in rows.parts])
            order = np.arange(len(numbers)) if rows.places is None else rows.places
            good = np.zeros(len(numbers), bool)
            good[histories.long_enough(self._split)] = True
            order, ends = order[good[order]], rows.ends[good[order]]
            for at in range(0, len(order), CHUNK):
                users = order[at : at + CHUNK]
                settings = (self.sampler, self._train, self._max_length, self._each, key)
                yield build_batch(histories, users, numbers[users], *settings), ends[at : at + CHUNK]
