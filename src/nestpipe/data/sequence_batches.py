"""Histories of users as batches for next-item models: one sample is one user.  Unit = sample.

Every batch has the features
  history    the items i_1 .. i_n a model sees, the latest `max_length` of them;
  target     what follows each of them (train: i_2 .. i_{n+1}; eval: the one item after the last, length 1);
  negatives  `negatives` uniform draws from the catalogue for each target, target by target (train only; a draw may hit
             the target itself);
  time       n+1 time stamps, those of the history and that of the last target: numbers, not ids to embed.

Leave-last-out: a user's last item is the target of `eval` and is in no `train` sample.  Users with fewer than three
items cannot be in both splits and are in neither; their items stay in the catalogue.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from nestpipe.data.batch import Batch
from nestpipe.data.counter import derive, permutation
from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.data.sequence_kernels import build_sequences
from nestpipe.data.stream import sample_ends

FEATURES = ["history", "target", "negatives", "time"]
LEAST = 3
CHUNK = 64
"""Samples built at a time: with 128 negatives at 200 positions that is 13 MB, and results do not depend on it."""


@dataclass(frozen=True)
class Histories:
    """Items and times of users, user by user, each in order of time; user u owns offsets[u]..offsets[u+1]."""

    users: np.ndarray
    offsets: np.ndarray
    items: np.ndarray
    times: np.ndarray

    def long_enough(self) -> np.ndarray:
        """The numbers of the users that have both a train and an eval sample."""
        return np.flatnonzero(np.diff(self.offsets) >= LEAST)


class SequenceSource:
    """The sequences of one split.  Train is permuted by (seed, epoch); negatives depend on (seed, epoch, user)."""

    features = FEATURES
    dense_features = 0

    def __init__(
        self, histories: Histories, catalogue: np.ndarray, split: str, seed: int, max_length: int, negatives: int
    ) -> None:
        self.catalogue = catalogue
        """Every item, sorted, int64: what negatives are drawn from and what a full evaluation ranks."""
        self.histories = histories
        self._rows = histories.long_enough()
        self.extent = len(self._rows)
        self.piece = 8 * CHUNK
        self._train = split == "train"
        self._seed = seed
        self._max_length = max_length
        self._negatives = negatives if self._train else 0
        self._order: tuple[int, np.ndarray] = (-1, self._rows)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self._train:
            return self._rows
        if self._order[0] != epoch:
            self._order = (epoch, self._rows[permutation(self.extent, derive(self._seed, "order", epoch))])
        return self._order[1]

    def read(self, start: int, stop: int, epoch: int) -> Iterator[tuple[Batch, np.ndarray]]:
        rows = self._epoch_order(epoch)
        key = derive(self._seed, "negatives", epoch)
        for at in range(start, stop, CHUNK):
            chunk = rows[at : min(at + CHUNK, stop)]
            yield self._build(chunk, key), sample_ends(at, len(chunk))

    def _build(self, rows: np.ndarray, key: np.uint64) -> Batch:
        h = self.histories
        lengths, values = build_sequences(
            rows, h.offsets, h.items, h.times, self.catalogue, self._train, self._max_length, self._negatives, key
        )
        sparse = KeyedJaggedTensor(
            FEATURES, torch.from_numpy(values), lengths=torch.from_numpy(lengths), stride=len(rows)
        )
        targets = lengths[len(rows) : 2 * len(rows)].astype(np.float32)
        return Batch(sparse, extras={"user": torch.from_numpy(h.users[rows])}, loss_terms=torch.from_numpy(targets))
