"""Where samples come from, and which of them are whose.

A `Source` is an ordered set of samples addressed by units: a unit is a sample, or a byte of a text file whose samples
cannot be counted without reading it.  One epoch is the units 0 to `extent`.  `shard` deals them to workers in pieces
that are read well together, so that no sample is lost or doubled whatever the number of workers, and workers stay close
in the data's own order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeGuard

import numpy as np

from nestpipe.data.batch import Batch
from nestpipe.errors import NestPipeError

Interval = tuple[int, int]


class DataError(NestPipeError, ValueError):
    """The data is not what the recipe says; the message names the file and the place."""

    exit_code = 2


class Source(Protocol):
    """An ordered, re-readable set of samples.  `read` may be called from one thread at a time."""

    extent: int
    """Units in one epoch."""
    piece: int
    """Units that are read well together (a row group, some megabytes of text)."""
    features: list[str]
    """Names of the sparse features, in the order of every batch."""
    dense_features: int
    """Columns of every batch's `dense`; 0 where it has none."""

    def read(self, start: int, stop: int, epoch: int) -> Iterator[tuple[Batch, np.ndarray]]:
        """The samples that begin in units start..stop of this epoch, in chunks of any size, in order.

        The array holds, for each sample of the chunk, the unit after it: reading may go on from there.
        """
        ...


class IndexedSource(Source, Protocol):
    """A source whose units are samples of known length: what load balance needs.

    `lengths` and `take` may be called from several threads at a time.
    """

    mean_length: float
    """Tokens of a sample in the mean."""

    def lengths(self, units: np.ndarray, epoch: int) -> np.ndarray:
        """Tokens of each of these samples, int64; reads none of them."""
        ...

    def take(self, units: np.ndarray, epoch: int) -> Batch:
        """These samples, in this order, as `read` would give them; a batch of none where there are no units."""
        ...


def is_indexed(source: object) -> TypeGuard[IndexedSource]:
    return all(hasattr(source, part) for part in ("mean_length", "lengths", "take"))


def split_interval(extent: int, split: str, eval_fraction: float) -> Interval:
    """The units of a split: eval has the last `eval_fraction` of all (rounded down), train what is before."""
    cut = extent - int(extent * eval_fraction)
    return (0, cut) if split == "train" else (cut, extent)


def shard(extent: int, piece: int, workers: int, rank: int) -> list[Interval]:
    """The intervals of `rank`: its turn in every round of `workers` pieces; the last round is shared evenly."""
    if extent <= 0:
        return []
    piece = max(1, min(piece, -(-extent // workers)))
    rounds = extent // (piece * workers)
    mine = [((k * workers + rank) * piece, (k * workers + rank + 1) * piece) for k in range(rounds)]
    done = rounds * workers * piece
    rest = extent - done
    start, stop = done + rest * rank // workers, done + rest * (rank + 1) // workers
    if stop > start:
        mine.append((start, stop))
    return mine
