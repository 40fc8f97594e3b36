"""Histories of users as batches for next-item models: one sample is one user.  Unit = sample.

Every batch has the features
  history    the items i_1 .. i_n a model sees, the latest `max_length` of them;
  target     what follows each of them (train: i_2 .. i_{n+1}; eval: the one item after the last, length 1);
  negatives  `negatives` draws from the catalogue for each target, target by target (train only; a draw may hit the
             target itself); none where they are a pool of the whole batch (`pool.py`);
  time       n+1 time stamps, those of the history and that of the last target: numbers, not ids to embed;
and, where the log has them, one value for each of the n+1 events of `time`, under their own names:
  action     the event's flags as bits;
  ...        context and candidate features.
Where events have weights, those of `history` and `target` are the events', and 1 elsewhere.

Every user's events are cut in two: `train` sees those before the cut, and the first one after it is the target of
`eval`.  Leave-last-out cuts before the last event.  Then users with fewer than three items cannot be in both splits and
are in neither; their items stay in the catalogue.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from nestpipe.data.batch import Batch
from nestpipe.data.counter import derive, permutation
from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.data.negatives import Negatives, Sampler, chances_of
from nestpipe.data.pool import CataloguePool, Pool, TargetPool
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
    cuts: np.ndarray | None = None
    """Events of each user before the cut between train and eval.  None: all but the last."""
    features: Mapping[str, np.ndarray] = field(default_factory=dict)
    """What else is known of every event, by name."""
    weights: np.ndarray | None = None

    @functools.cached_property
    def cut(self) -> np.ndarray:
        return np.diff(self.offsets) - 1 if self.cuts is None else self.cuts

    def long_enough(self, split: str = "train") -> np.ndarray:
        """The numbers of the users that have a sample in a split; leaving the last out, they are in both or in none."""
        lengths = np.diff(self.offsets)
        if self.cuts is None:
            return np.flatnonzero(lengths >= LEAST)
        return np.flatnonzero(self.cuts >= 2 if split == "train" else (self.cuts >= 1) & (self.cuts < lengths))


class SequenceSource:
    """The sequences of one split.  Train is permuted by (seed, epoch); negatives depend on (seed, epoch, user)."""

    dense_features = 0

    def __init__(
        self,
        histories: Histories,
        catalogue: np.ndarray,
        split: str,
        seed: int,
        max_length: int,
        negatives: int | Negatives,
    ) -> None:
        self.catalogue = catalogue
        """Every item, sorted, int64: what negatives are drawn from and what a full evaluation ranks."""
        self.statistics: dict[str, Any] = {}
        """What a report tells about the log, where it was prepared."""
        self.digest: str | None = None
        """Of the log and what was made of it: a run resumes on the same one only."""
        self.features = [*FEATURES, *histories.features]
        self.histories = histories
        self._rows = histories.long_enough(split)
        self.extent = len(self._rows)
        self.piece = 8 * CHUNK
        self._train = split == "train"
        self._seed = seed
        self._max_length = max_length
        self._orders: tuple[tuple[int, np.ndarray], ...] = ()
        """Of the last two epochs: balanced streams are in both where one ends."""
        self.negatives = Negatives(negatives) if isinstance(negatives, int) else negatives
        if self.negatives.sampling == "uniform" or not self._train:
            self.sampler = Sampler.of(catalogue)
        else:
            self.sampler = Sampler.of(catalogue, chances_of(self.negatives.sampling, self._counts()))
        self.pool = self._pool() if self._train and self.negatives.drawn_for == "pool" else None
        """Negatives of whole batches; None where each target has its own."""
        self._each = self.negatives.number if self._train and self.pool is None else 0

    def _pool(self) -> Pool:
        if self.negatives.sampling != "in-batch":
            return CataloguePool(self.sampler, self.negatives.number, self._seed)
        h = self.histories
        settings = (h.offsets[:-1] + h.cut, self._targets(), h.items, self.negatives.number, self._seed)
        return TargetPool(self._order_of, *settings)

    def _targets(self) -> np.ndarray:
        """How many each user has in training."""
        return np.clip(self.histories.cut - 1, 0, self._max_length)

    def _counts(self) -> np.ndarray:
        """How often each item occurs in training; as a target, where negatives are other targets."""
        if self.negatives.sampling != "in-batch":
            return self.popularity()
        h, counts = self.histories, self._targets()[self._rows]
        places = spans((h.offsets[:-1] + h.cut)[self._rows] - counts, counts)
        return np.bincount(np.searchsorted(self.catalogue, h.items[places]), minlength=len(self.catalogue))

    @functools.cached_property
    def _tokens(self) -> np.ndarray:
        """Of every user's history in batches."""
        return np.minimum(self.histories.cut - (1 if self._train else 0), self._max_length).astype(np.int64)

    @functools.cached_property
    def mean_length(self) -> float:
        """Tokens of a history in batches."""
        return float(self._tokens[self._rows].mean()) if self.extent else 0.0

    @property
    def longest(self) -> int:
        """Of the histories in batches, of either split."""
        return min(self._max_length, int(self.histories.cut.max(initial=0)))

    def popularity(self) -> np.ndarray:
        """How often each item of the catalogue occurs in training."""
        h = self.histories
        before = np.arange(len(h.items)) - np.repeat(h.offsets[:-1], np.diff(h.offsets)) < np.repeat(
            h.cut, np.diff(h.offsets)
        )
        return np.bincount(np.searchsorted(self.catalogue, h.items[before]), minlength=len(self.catalogue))

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self._train:
            return self._rows
        known = self._orders
        for number, order in known:
            if number == epoch:
                return order
        order = self._order_of(epoch)
        self._orders = ((epoch, order), *known[:1])  # in one assignment: several streams read at the same time
        return order

    def lengths(self, units: np.ndarray, epoch: int) -> np.ndarray:
        """Tokens of the histories of these samples."""
        return self._tokens[self._epoch_order(epoch)[units]]

    def take(self, units: np.ndarray, epoch: int) -> Batch:
        """These samples, in this order."""
        return self._build(self._epoch_order(epoch)[units], derive(self._seed, "negatives", epoch))

    def _order_of(self, epoch: int) -> np.ndarray:
        return self._rows[permutation(self.extent, derive(self._seed, "order", epoch))]

    def read(self, start: int, stop: int, epoch: int) -> Iterator[tuple[Batch, np.ndarray]]:
        rows = self._epoch_order(epoch)
        key = derive(self._seed, "negatives", epoch)
        for at in range(start, stop, CHUNK):
            chunk = rows[at : min(at + CHUNK, stop)]
            yield self._build(chunk, key), sample_ends(at, len(chunk))

    def _build(self, rows: np.ndarray, key: np.uint64) -> Batch:
        settings = (self.sampler, self._train, self._max_length, self._each, key)
        return build_batch(self.histories, rows, rows, *settings)


def build_batch(
    histories: Histories,
    rows: np.ndarray,
    numbers: np.ndarray,
    sampler: Sampler,
    train: bool,
    max_length: int,
    negatives: int,
    key: np.uint64,
) -> Batch:
    """The samples of the users `rows`.  A user's negatives depend on `key` and on the user's number."""
    h, count = histories, len(rows)
    events = (rows, numbers, h.offsets, h.cut, h.items, h.times)
    draws = (sampler.items, sampler.keep, sampler.alias)
    lengths, values, lasts = build_sequences(*events, *draws, train, max_length, negatives, key)
    names, weights = list(FEATURES), None
    if h.features:
        each = lengths[3 * count :]
        at = spans(lasts - each, each)
        lengths = np.concatenate([lengths, *[each] * len(h.features)])
        values = np.concatenate([values, *(feature[at] for feature in h.features.values())])
        names += h.features
    if h.weights is not None:
        weights = torch.from_numpy(_weights(h.weights, lengths, lasts, len(values), count))
    sparse = KeyedJaggedTensor(
        names, torch.from_numpy(values), weights, lengths=torch.from_numpy(lengths), stride=count
    )
    targets = lengths[count : 2 * count].astype(np.float32)
    return Batch(sparse, extras={"user": torch.from_numpy(h.users[rows])}, loss_terms=torch.from_numpy(targets))


def _weights(of_events: np.ndarray, lengths: np.ndarray, lasts: np.ndarray, count: int, samples: int) -> np.ndarray:
    """Of every id: its event's weight in `history` and `target`, 1 elsewhere."""
    history, target = lengths[:samples], lengths[samples : 2 * samples]
    weights = np.ones(count, np.float32)
    at = np.concatenate([spans(lasts - 1 - history, history), spans(lasts - target, target)])
    weights[: len(at)] = of_events[at]
    return weights


def spans(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ... (lengths[0] numbers), starts[1], ..."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
