"""MovieLens, as clicks (is the rating high?) or as sequences (what does the user rate next?)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from nestpipe.data.balance.keys import BalanceKeys
from nestpipe.data.batch import Batch
from nestpipe.data.checks import check_fraction, check_number, check_split, check_text, check_whole
from nestpipe.data.counter import derive, permutation
from nestpipe.data.history_lengths import describe_lengths
from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.data.negatives import DrawnFor, Negatives, Sampling
from nestpipe.data.ratings import Ratings, read_ratings
from nestpipe.data.sequence_batches import LEAST, Histories, SequenceSource
from nestpipe.data.source import DataError, Source
from nestpipe.data.stream import sample_ends
from nestpipe.data.ties import TIES, Ties, count_ties

TASKS = ("clicks", "sequences")
CHUNK = 2048


@dataclass(frozen=True)
class MovieLensData(BalanceKeys):
    """Ratings from `u.data`, `ratings.dat`, `ratings.csv`, a folder of one of them, or the original zip."""

    path: str = ""
    """The ratings as they come: u.data, ratings.dat, ratings.csv, a folder with one of these, or the original zip."""
    task: str = "sequences"
    """clicks: features user and item, label 1 for a high rating.  sequences: see `sequence_batches`."""
    max_length: int = 200
    """Sequences: the longest history."""
    negatives: int = 128
    """Sequences: draws from the catalogue for each target, or of a pool."""
    negatives_from: DrawnFor = "each"
    """Sequences, each: negatives are drawn for each target.  pool: once for a whole batch of all workers, for all its targets."""
    sampling: Sampling = "uniform"
    """Sequences: negatives by uniform, log-uniform (over popularity ranks), popularity, or in-batch (targets of the batch; for a
    pool)."""
    positive: float = 4.0
    """Clicks: the least rating that counts as a click."""
    eval_fraction: float = 0.1
    """Clicks: the share of every user's ratings, the latest ones, that is held out (rounded down)."""
    ties: Ties = "file"
    """The order of a user's ratings of one second: as in the file, random (drawn from the seed), or meta (as Meta's research
    code has them)."""

    def __post_init__(self) -> None:
        check_text("path", self.path, "ml-1m.zip")
        if self.task not in TASKS:
            raise ValueError(f"data.task must be 'clicks' or 'sequences', not {self.task!r}")
        check_whole("max_length", self.max_length)
        self._negatives()
        check_number("positive", self.positive)
        check_fraction("eval_fraction", self.eval_fraction)
        if self.ties not in TIES:
            raise ValueError(f"data.ties must be 'file', 'random' or 'meta', not {self.ties!r}")
        clicks = "needs histories: set data.task = 'sequences', or leave it out"
        self.check_balance(clicks if self.task == "clicks" else None)

    def open(self, split: str, seed: int) -> Source:
        check_split(split)
        ratings = read_ratings(self.path, self.ties, seed)
        if self.task == "clicks":
            return RatingSource(ratings, split, seed, self.positive, self.eval_fraction)
        users, offsets = ratings.by_user()
        histories = Histories(users, offsets, ratings.item, ratings.time)
        if not len(histories.long_enough()):
            raise DataError(f"{self.path}: no user has the {LEAST} ratings that a sequence needs")
        source = SequenceSource(histories, np.unique(ratings.item), split, seed, self.max_length, self._negatives())
        source.statistics = {
            "lengths": describe_lengths(np.diff(offsets)),
            "ties": {**count_ties(offsets, ratings.time), "order": self.ties},
        }
        return source

    def _negatives(self) -> Negatives:
        return Negatives(self.negatives, self.negatives_from, self.sampling)


class RatingSource:
    """Ratings as clicks, unit = sample; train is permuted by (seed, epoch), eval is in order of user and time."""

    def __init__(self, ratings: Ratings, split: str, seed: int, positive: float, eval_fraction: float) -> None:
        self.features = ["user", "item"]
        self.dense_features = 0
        self.piece = CHUNK
        self.ratings = ratings
        _, offsets = ratings.by_user()
        counts = np.diff(offsets)
        held_out = np.floor(counts * eval_fraction).astype(np.int64)
        left = np.repeat(offsets[1:], counts) - np.arange(len(ratings.user))  # 1 at a user's last rating
        last = left <= np.repeat(held_out, counts)
        self._rows = np.flatnonzero(~last if split == "train" else last)
        self.extent = len(self._rows)
        self._shuffled = split == "train"
        self._seed = seed
        self._positive = positive
        self._order: tuple[int, np.ndarray] = (-1, self._rows)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._shuffled and self._order[0] != epoch:
            self._order = (epoch, self._rows[permutation(self.extent, derive(self._seed, "order", epoch))])
        return self._order[1]

    def read(self, start: int, stop: int, epoch: int) -> Iterator[tuple[Batch, np.ndarray]]:
        order = self._epoch_order(epoch)
        for at in range(start, stop, CHUNK):
            rows = order[at : min(at + CHUNK, stop)]
            ids = torch.from_numpy(np.concatenate([self.ratings.user[rows], self.ratings.item[rows]]))
            sparse = KeyedJaggedTensor(self.features, ids, lengths=torch.ones_like(ids), stride=len(rows))
            labels = torch.from_numpy((self.ratings.rating[rows] >= self._positive).astype(np.float32))
            time = torch.from_numpy(self.ratings.time[rows])
            yield Batch(sparse, labels=labels, extras={"time": time}), sample_ends(at, len(rows))
