"""Synthetic long histories: any number of users and items, drawn when they are read, with a best possible hit rate that is
known."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nestpipe.data.balance.keys import BalanceKeys
from nestpipe.data.batch import Batch
from nestpipe.data.best_hits import best_hits
from nestpipe.data.checks import check_fraction, check_number, check_split, check_texts, check_whole
from nestpipe.data.counter import derive
from nestpipe.data.global_batches import GlobalBatches
from nestpipe.data.history_lengths import describe_lengths
from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.data.long_histories_kernels import World, draw_batch, draw_lengths, draw_pool, item_ids
from nestpipe.data.long_requests import LongRequestSource
from nestpipe.data.negatives import DrawnFor, Negatives
from nestpipe.data.sequence_batches import CHUNK, FEATURES, LEAST
from nestpipe.data.shuffled_numbers import shuffled_numbers
from nestpipe.data.stream import sample_ends

RANKED = 1 << 22
"""Items that an evaluation can rank: it holds a row of each."""
CHUNK_NUMBERS = 1 << 21
"""A chunk has about so many numbers; results do not depend on it."""
TOLD_USERS = 100_000
"""Users whose lengths are described, where there are more."""
MOST_ACTIONS = 31
"""Bits of a history's actions."""
BEST_USERS = 1000
"""Users over whom the best possible hit rate is the mean, where more are evaluated."""


@dataclass(frozen=True)
class LongHistoriesData(BalanceKeys):
    """Users whose interests drift.  A history depends on (seed, user) alone; batches as in `sequence_batches`.

    Lengths are log-normal; with the default `sigma` they are spread as in KuaiRand-27K, whose median is 8,594.  Interests are
    a ring of groups.  A session has one; the next session has the same or, with the chance `drift`, a neighbour.  An item
    follows from the one before it, with the chance `order`, or is drawn from the interest's power law.
    """

    users: int = 10_000
    """Users, one sample each."""
    items: int = 100_000
    """Items of the catalogue, up to 2^40."""
    groups: int = 100
    """Interests: groups of items, in a ring."""
    median_length: float = 8594.0
    """Median events of a user."""
    sigma: float = 0.82
    """Spread of the logarithm of lengths; 0: all users have as many events."""
    zipf: float = 1.0
    """Exponent of the power law of item popularity inside a group."""
    order: float = 0.5
    """The chance that an item follows from the one before it."""
    session: int = 64
    """Events of a session."""
    drift: float = 0.5
    """The chance that the interest changes from a session to the next."""
    max_length: int = 2048
    """The longest history in a batch: the latest events."""
    negatives: int = 128
    """Uniform draws from the catalogue, for each target or in the pool."""
    negatives_from: DrawnFor = "each"
    """each: negatives for each target.  pool: once for a whole batch of all workers, for all its targets."""
    candidates: int = 0
    """For model.task = "ranking": events that a request asks about, those after its history.  0: samples of next items."""
    actions: Sequence[str] = ("click", "like")
    """With candidates: names of what users do, drawn with chances by item and by the user's opinion of its group."""
    eval_users: int = 1000
    """Users whose last item is predicted in evaluations: the first ones, at most all.  0: no evaluation."""

    def __post_init__(self) -> None:
        check_whole("users", self.users, 1, 2**40)
        check_whole("items", self.items, 1, 2**40)
        check_whole("groups", self.groups)
        if self.groups > self.items:
            raise ValueError(f"data.groups must be at most data.items ({self.items}), not {self.groups}")
        check_number("median_length", self.median_length, LEAST, 10_000_000)
        check_number("sigma", self.sigma, 0.0, 3.0)
        check_number("zipf", self.zipf, 0.0, 10.0)
        check_fraction("order", self.order)
        check_whole("session", self.session)
        check_number("drift", self.drift, 0.0, 1.0)
        check_whole("max_length", self.max_length)
        Negatives(self.negatives, self.negatives_from)
        self.check_balance()
        check_whole("eval_users", self.eval_users, 0)
        check_whole("candidates", self.candidates, 0)
        if isinstance(self.actions, str):
            raise ValueError(f"data.actions must be a list of names, not {self.actions!r}")
        check_texts("actions", self.actions, "click", empty=True)
        if self.candidates and not 1 <= len(self.actions) <= MOST_ACTIONS:
            raise ValueError(f"data.actions needs from 1 to {MOST_ACTIONS} names, not {len(self.actions)}")
        if self.eval_users and not self.candidates and self.items > RANKED:
            raise ValueError(
                f"an evaluation ranks all items, and data.items ({self.items:,}) are too many for that: set data.eval_users = 0, "
                f"or at most {RANKED:,} items"
            )

    def open(self, split: str, seed: int) -> LongHistorySource | LongRequestSource:
        check_split(split)
        if self.candidates:
            return LongRequestSource(self, self.world(seed), split, seed)
        return LongHistorySource(self, split, seed)

    def world(self, seed: int) -> World:
        """What all users share."""
        return World(
            self.items,
            self.groups,
            float(self.zipf),
            float(self.order),
            float(self.drift),
            self.session,
            float(self.median_length),
            float(self.sigma),
            LEAST,
            derive(seed, "histories", "items"),
            derive(seed, "histories", "follow"),
            derive(seed, "histories", "users"),
        )


class LongHistorySource:
    """Draws samples on demand; unit = sample.  Train is permuted by (seed, epoch); negatives depend on (seed, epoch, user).

    Keeps nothing of any user, and its methods may be called from several threads at a time.
    """

    dense_features = 0

    def __init__(self, data: LongHistoriesData, split: str, seed: int) -> None:
        self.data = data
        self.features = list(FEATURES)
        self.digest = None
        self.piece = 8 * CHUNK
        self._train = split == "train"
        self.extent = data.users if self._train else min(data.users, data.eval_users)
        self.longest = data.max_length
        self._seed = seed
        pooled = data.negatives_from == "pool"
        self._negatives = data.negatives if self._train and not pooled else 0
        self.world = data.world(seed)
        self.pool = HistoriesPool(self.world, data.negatives, seed) if self._train and pooled else None

    @functools.cached_property
    def catalogue(self) -> np.ndarray:
        """Every item, sorted: what a full evaluation ranks.  Without evaluation it is empty; negatives do not need it."""
        return np.sort(item_ids(self.world)) if self.data.eval_users else np.empty(0, np.int64)

    @functools.cached_property
    def mean_length(self) -> float:
        """Tokens of a history in batches, over some users where there are many."""
        lengths = draw_lengths(np.arange(min(self.extent, TOLD_USERS)), self.world)
        return float(self._tokens(lengths).mean()) if len(lengths) else 0.0

    @functools.cached_property
    def statistics(self) -> dict[str, Any]:
        """What a report tells: lengths, and the best possible hit rate, over some users where there are many."""
        lengths = describe_lengths(draw_lengths(np.arange(min(self.data.users, TOLD_USERS)), self.world))
        best = self.best_hit_rates([10])
        if not best:
            return {"lengths": lengths}
        note = (
            f"best possible HR@10 {best['hr@10']:.4f}: of a ranking that knows every user's interest, an upper bound for models "
            f"(the mean over {best['users']:,} users)"
        )
        return {"lengths": lengths, "best": best, "notes": [note]}

    def best_hit_rates(self, top_k: Sequence[int], users: int | None = None) -> dict[str, float]:
        """The hit rates that no model can exceed but by chance, over the first users that are evaluated; {} without any.

        Exact given these users' histories: see `best_hits`.
        """
        count = min(self.data.users, self.data.eval_users, BEST_USERS, self.data.users if users is None else users)
        if not count:
            return {}
        top = np.array(top_k, np.int64)
        mean = best_hits(np.arange(count), self.data.max_length, top, self.world).mean(axis=0)
        return {**{f"hr@{k}": float(best) for k, best in zip(top_k, mean)}, "users": count}

    def lengths(self, units: np.ndarray, epoch: int) -> np.ndarray:
        """Tokens of the histories of these samples in batches; draws none of them."""
        return self._tokens(draw_lengths(self._users(units, epoch), self.world))

    def take(self, units: np.ndarray, epoch: int) -> Batch:
        """These samples, in this order."""
        users = self._users(units, epoch)
        lengths, values = draw_batch(
            users,
            self._train,
            self.data.max_length,
            self._negatives,
            derive(self._seed, "negatives", epoch),
            self.world,
        )
        sparse = KeyedJaggedTensor(
            self.features, torch.from_numpy(values), lengths=torch.from_numpy(lengths), stride=len(users)
        )
        terms = torch.from_numpy(lengths[len(users) : 2 * len(users)].astype(np.float32))
        return Batch(sparse, extras={"user": torch.from_numpy(users)}, loss_terms=terms)

    def read(self, start: int, stop: int, epoch: int) -> Iterator[tuple[Batch, np.ndarray]]:
        chunk = max(1, min(CHUNK, CHUNK_NUMBERS // (self.data.max_length * (3 + self._negatives))))
        for at in range(start, stop, chunk):
            units = np.arange(at, min(at + chunk, stop))
            yield self.take(units, epoch), sample_ends(at, len(units))

    def _tokens(self, lengths: np.ndarray) -> np.ndarray:
        return np.minimum(lengths - (2 if self._train else 1), self.data.max_length)

    def _users(self, units: np.ndarray, epoch: int) -> np.ndarray:
        units = np.asarray(units, np.int64)
        if not self._train:
            return units.copy()
        return shuffled_numbers(units, self.extent, derive(self._seed, "order", epoch))


@dataclass(frozen=True)
class HistoriesPool:
    """Negatives of whole batches, drawn from all items without a list of them."""

    world: World
    size: int
    seed: int
    feature: str = "negatives"

    def ids(self, number: int, batches: GlobalBatches) -> np.ndarray:
        return draw_pool(self.size, derive(self.seed, "pool", number), self.world)
