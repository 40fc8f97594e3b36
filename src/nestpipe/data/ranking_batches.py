"""Histories of users as batches for ranking models: one sample is one request of one user.  Unit = sample.

Every batch has the features
  history    the items of the window before the request (`requests`), at least one;
  candidate  the items of the next events, at most `candidates`;
  time       the times of the history and of the request, which is that of the first candidate;
  action     what the user did with each item of the history, as bits;
  label      what the user did with each candidate, as bits;
and context features, where the log has them, one value for each item of the history.  `extras` have the user and the number of
the window's first event.  The loss is a mean over candidates, so these are a sample's terms.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from nestpipe.data.batch import Batch
from nestpipe.data.counter import derive, permutation
from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.data.requests import Requests, place_requests
from nestpipe.data.sequence_batches import CHUNK, Histories, spans
from nestpipe.data.stream import sample_ends

FEATURES = ["history", "candidate", "time", "action", "label"]
LEAST = 3
"""Events of a user that is trained and evaluated on."""


def last_cuts(lengths: np.ndarray, candidates: int) -> np.ndarray:
    """Events of each user before its last `candidates`, which are held out; two at least, for training."""
    return np.maximum(lengths - candidates, np.minimum(lengths - 1, 2))


def ranking_batch(values: dict[str, np.ndarray], requests: Requests, users: np.ndarray) -> Batch:
    """From the values of every feature, request after request."""
    n, c = requests.length, requests.candidates
    lengths = {"candidate": c, "label": c, "time": n + 1}
    sparse = KeyedJaggedTensor(
        list(values),
        torch.from_numpy(np.concatenate([np.asarray(part, np.int64) for part in values.values()])),
        lengths=torch.from_numpy(np.concatenate([lengths.get(name, n) for name in values])),
        stride=len(users),
    )
    extras = {"user": torch.from_numpy(users), "start": torch.from_numpy(requests.first)}
    return Batch(sparse, extras=extras, loss_terms=torch.from_numpy(c.astype(np.float32)))


class RankingSource:
    """The requests of one split of histories in memory.  Train is permuted by (seed, epoch); places of requests are drawn."""

    dense_features = 0
    pool = None

    def __init__(
        self,
        histories: Histories,
        catalogue: np.ndarray,
        split: str,
        seed: int,
        max_length: int,
        candidates: int,
        actions: Sequence[str],
    ) -> None:
        self.catalogue, self.actions, self.max_length = catalogue, tuple(actions), max_length
        self.statistics: dict[str, Any] = {}
        self.digest: str | None = None
        self.context = [name for name in histories.features if name != "action"]
        self.features = [*FEATURES, *self.context]
        self.piece = 8 * CHUNK
        self.longest = max_length
        self._histories, self._train, self._seed, self._candidates = histories, split == "train", seed, candidates
        self._totals = np.diff(histories.offsets)
        self._cuts = last_cuts(self._totals, candidates) if histories.cuts is None else histories.cuts
        held_out = self._cuts < self._totals
        enough = self._totals >= LEAST if histories.cuts is None else self._totals > 0
        self._rows = np.flatnonzero(enough & (self._cuts >= 2 if self._train else (self._cuts >= 1) & held_out))
        self.extent = len(self._rows)
        self._orders: tuple[tuple[int, np.ndarray], ...] = ()
        """Of the last two epochs: streams are in both where one ends."""

    @functools.cached_property
    def mean_length(self) -> float:
        return float(self.lengths(np.arange(self.extent), 0).mean()) if self.extent else 0.0

    def lengths(self, units: np.ndarray, epoch: int) -> np.ndarray:
        """Tokens of these samples, candidates among them."""
        requests = self._requests(self._epoch_order(epoch)[units], epoch)
        return requests.length + requests.candidates

    def take(self, units: np.ndarray, epoch: int) -> Batch:
        """These samples, in this order."""
        return self._build(self._epoch_order(epoch)[units], epoch)

    def read(self, start: int, stop: int, epoch: int) -> Iterator[tuple[Batch, np.ndarray]]:
        rows = self._epoch_order(epoch)
        for at in range(start, stop, CHUNK):
            chunk = rows[at : min(at + CHUNK, stop)]
            yield self._build(chunk, epoch), sample_ends(at, len(chunk))

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if not self._train:
            return self._rows
        known = self._orders
        for number, order in known:
            if number == epoch:
                return order
        order = self._rows[permutation(self.extent, derive(self._seed, "order", epoch))]
        self._orders = ((epoch, order), *known[:1])  # in one assignment: several streams read at the same time
        return order

    def _requests(self, rows: np.ndarray, epoch: int) -> Requests:
        key = derive(self._seed, "requests", epoch)
        settings = (self._train, self._candidates, self.max_length, key)
        return Requests(*place_requests(rows, self._cuts[rows], self._totals[rows], *settings))

    def _build(self, rows: np.ndarray, epoch: int) -> Batch:
        h, requests = self._histories, self._requests(rows, epoch)
        first = h.offsets[rows] + requests.first
        history = spans(first, requests.length)
        candidates = spans(first + requests.length, requests.candidates)
        values = {
            "history": h.items[history],
            "candidate": h.items[candidates],
            "time": h.times[spans(first, requests.length + 1)],
            "action": h.features["action"][history],
            "label": h.features["action"][candidates],
            **{name: h.features[name][history] for name in self.context},
        }
        return ranking_batch(values, requests, h.users[rows])
