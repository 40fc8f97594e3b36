"""Ranking requests on synthetic long histories, drawn when they are read, with a best possible AUC that is known."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from nestpipe.data.batch import Batch
from nestpipe.data.counter import derive
from nestpipe.data.history_lengths import describe_lengths
from nestpipe.data.long_histories_kernels import World, draw_lengths, item_ids
from nestpipe.data.long_requests_kernels import draw_requests, true_logits
from nestpipe.data.ranking_batches import FEATURES, last_cuts, ranking_batch
from nestpipe.data.requests import Requests, place_requests
from nestpipe.data.sequence_batches import CHUNK
from nestpipe.data.shuffled_numbers import shuffled_numbers
from nestpipe.data.stream import sample_ends

TOLD_USERS = 100_000
CHUNK_NUMBERS = 1 << 21


class LongRequestSource:
    """Draws requests on demand; unit = sample.  Keeps nothing of any user; any number of threads may read."""

    dense_features = 0
    pool = None

    def __init__(self, data: Any, world: World, split: str, seed: int) -> None:
        self.data, self.world = data, world
        self.actions, self.max_length, self.longest = tuple(data.actions), data.max_length, data.max_length
        self.features = list(FEATURES)
        self.digest = None
        self.piece = 8 * CHUNK
        self._train, self._seed = split == "train", seed
        self._key = derive(seed, "histories", "actions")
        self.extent = data.users if self._train else min(data.users, data.eval_users)

    @functools.cached_property
    def catalogue(self) -> np.ndarray:
        return np.sort(item_ids(self.world))

    @functools.cached_property
    def mean_length(self) -> float:
        """Tokens of a sample, over some users where there are many."""
        units = np.arange(min(self.extent, TOLD_USERS))
        return float(self.lengths(units, 0).mean()) if len(units) else 0.0

    @functools.cached_property
    def statistics(self) -> dict[str, Any]:
        lengths = draw_lengths(np.arange(min(self.data.users, TOLD_USERS)), self.world)
        return {"lengths": describe_lengths(lengths)}

    def true_logits(self, users: np.ndarray, items: np.ndarray) -> np.ndarray:
        """[n, actions]: what user users[i] does with the item of number items[i], before it is drawn."""
        return true_logits(users, items, len(self.actions), self._key, self.world)

    def best_logits(self, batch: Batch) -> np.ndarray:
        """[candidates, actions] of a batch: no model can order them better, but by chance."""
        candidates = batch.sparse_features["candidate"]
        users = np.repeat(batch.extras["user"].numpy(), candidates.lengths().numpy())
        return self.true_logits(users, self._numbers[np.searchsorted(self.catalogue, candidates.values().numpy())])

    @functools.cached_property
    def _numbers(self) -> np.ndarray:
        """Of the items of the catalogue."""
        return np.argsort(item_ids(self.world), kind="stable")

    def lengths(self, units: np.ndarray, epoch: int) -> np.ndarray:
        """Tokens of these samples, candidates among them; draws none of them."""
        requests = self._requests(self._users(units, epoch), epoch)
        return requests.length + requests.candidates

    def take(self, units: np.ndarray, epoch: int) -> Batch:
        """These samples, in this order."""
        users = self._users(units, epoch)
        requests = self._requests(users, epoch)
        drawn = draw_requests(users, *requests, len(self.actions), self._key, self.world)
        return ranking_batch(dict(zip(FEATURES, drawn)), requests, users)

    def read(self, start: int, stop: int, epoch: int) -> Iterator[tuple[Batch, np.ndarray]]:
        chunk = max(1, min(CHUNK, CHUNK_NUMBERS // (3 * self.data.max_length)))
        for at in range(start, stop, chunk):
            units = np.arange(at, min(at + chunk, stop))
            yield self.take(units, epoch), sample_ends(at, len(units))

    def _requests(self, users: np.ndarray, epoch: int) -> Requests:
        totals, candidates = draw_lengths(users, self.world), self.data.candidates
        key = derive(self._seed, "requests", epoch)
        cuts = last_cuts(totals, candidates)
        return Requests(*place_requests(users, cuts, totals, self._train, candidates, self.max_length, key))

    def _users(self, units: np.ndarray, epoch: int) -> np.ndarray:
        units = np.asarray(units, np.int64)
        if not self._train:
            return units.copy()
        return shuffled_numbers(units, self.extent, derive(self._seed, "order", epoch))
