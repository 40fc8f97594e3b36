"""Synthetic histories of users who share interests: next-item prediction that can be learned, without any file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nestpipe.data.balance.keys import BalanceKeys
from nestpipe.data.checks import check_fraction, check_number, check_split, check_whole
from nestpipe.data.counter import derive
from nestpipe.data.negatives import DrawnFor, Negatives, Sampling
from nestpipe.data.sequence_batches import LEAST, Histories, SequenceSource
from nestpipe.data.sequences_kernels import draw_histories, draw_lengths, item_ids


@dataclass(frozen=True)
class SequencesData(BalanceKeys):
    """Users of `groups` shared interests.  A history depends on (seed, user) alone; batches as in `sequence_batches`.

    A user has a main and a side interest, each a group of items whose popularity falls off as a power law.  With the
    chance `order` the next item is the one that always follows the present item; otherwise it is drawn from one of the
    two interests.  All histories are held in memory: 16 bytes an item.
    """

    users: int = 10_000
    """Users, one sample each."""
    items: int = 2_000
    """Items of the catalogue."""
    groups: int = 20
    """Interest groups that users and items belong to."""
    max_length: int = 100
    """The longest history in a batch; users may have longer ones."""
    mean_length: float = 40.0
    """Mean items of a user; lengths are log-normal, so that a few users have very many."""
    zipf: float = 1.0
    """Exponent of the power law of item popularity inside a group."""
    order: float = 0.5
    """The chance that the next item follows from the present one."""
    negatives: int = 64
    """Draws from the catalogue for each target, or of a pool."""
    negatives_from: DrawnFor = "each"
    """each: negatives are drawn for each target.  pool: once for a whole batch of all workers, for all its targets."""
    sampling: Sampling = "uniform"
    """Negatives by uniform, log-uniform (over popularity ranks), popularity, or in-batch (targets of the batch; for a
    pool)."""

    def __post_init__(self) -> None:
        check_whole("users", self.users)
        check_whole("items", self.items, 1, 2**31)
        check_whole("groups", self.groups)
        if self.groups > self.items:
            raise ValueError(f"data.groups must be at most data.items ({self.items}), not {self.groups}")
        check_whole("max_length", self.max_length)
        check_number("mean_length", self.mean_length, LEAST, 100_000)
        check_number("zipf", self.zipf, 0.0, 10.0)
        check_fraction("order", self.order)
        self._negatives()
        self.check_balance()

    def open(self, split: str, seed: int) -> SequenceSource:
        check_split(split)
        ids = item_ids(self.items, derive(seed, "sequences", "items"))
        lengths = draw_lengths(self.users, self.mean_length, LEAST, derive(seed, "sequences", "lengths"))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        items, times = draw_histories(
            offsets, ids, self.groups, float(self.zipf), float(self.order), derive(seed, "sequences", "walks")
        )
        histories = Histories(np.arange(self.users), offsets, items, times)
        return SequenceSource(histories, np.sort(ids), split, seed, self.max_length, self._negatives())

    def _negatives(self) -> Negatives:
        return Negatives(self.negatives, self.negatives_from, self.sampling)
