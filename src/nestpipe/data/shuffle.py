"""A seeded order of samples that are stored in groups.  Index arithmetic alone: it reads nothing and keeps nothing.

An epoch lays the groups out one after another, in an order of its own.  The layout is cut into blocks of so many samples, and
each block is permuted inside.  So a sample's place depends on the seed, the epoch, the sizes of the groups and the size of a
block; a reader can begin at any unit, and needs only the groups that its blocks touch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nestpipe.data.counter import derive, permutation


@dataclass(frozen=True)
class Pick:
    """The samples of some units of one block: which rows of which groups they are, and in which order."""

    first: int
    """The first of the units."""
    groups: list[int]
    """The groups to read, in the order of the layout."""
    rows: list[np.ndarray]
    """Of each of them, the rows that are wanted, ascending, counted from the group's first."""
    places: np.ndarray
    """Of each unit, where its sample is among all these rows one after another."""
    goes_on: int | None
    """The group that the next block begins in, too; None where the block ends with a group."""

    def order(self, there: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
        """`places`, and of each sample the unit after it, when only those `groups` that are `there` have rows."""
        ends = np.arange(self.first + 1, self.first + 1 + len(self.places))
        if all(there):
            return self.places, ends
        kept = np.repeat(np.array(there, bool), [len(rows) for rows in self.rows])
        mine = kept[self.places]
        return (np.cumsum(kept) - 1)[self.places[mine]], ends[mine]


class Shuffle:
    """The order of the samples of groups with these `sizes`, some of which may be 0, in blocks of `block` samples."""

    def __init__(self, sizes: Sequence[int] | np.ndarray, block: int, seed: int) -> None:
        assert block >= 1
        self.sizes = np.asarray(sizes, np.int64)
        self.block = block
        self.seed = seed
        self.extent = int(self.sizes.sum())
        self._layout: tuple[int, np.ndarray, np.ndarray] | None = None

    @property
    def piece(self) -> int:
        """Units that are read well together: whole blocks, at least as many samples as the largest group has.

        If blocks were dealt to workers one by one, each worker would read nearly all of the groups that are larger.
        """
        largest = int(self.sizes.max(initial=1))
        return self.block * -(-largest // self.block)

    def picks(self, start: int, stop: int, epoch: int) -> Iterator[Pick]:
        """What is to be read for the units start..stop of an epoch, block by block."""
        while start < stop:
            block = start // self.block
            end = min(stop, (block + 1) * self.block)
            yield self._pick(block, start, end, epoch)
            start = end

    def _pick(self, block: int, start: int, stop: int, epoch: int) -> Pick:
        order, starts = self._lay_out(epoch)
        begin, end = block * self.block, min((block + 1) * self.block, self.extent)
        within = permutation(end - begin, derive(self.seed, "block", epoch, block))
        wanted = begin + within[start - begin : stop - begin]
        by_layout = np.argsort(wanted, kind="stable")
        places = np.empty_like(by_layout)
        places[by_layout] = np.arange(len(by_layout))
        wanted = wanted[by_layout]
        # Of groups of size 0, which begin where the next one does, "right" finds none.
        at = np.searchsorted(starts, wanted, side="right") - 1
        touched, firsts = np.unique(at, return_index=True)
        rows = np.split(wanted - starts[at], firsts[1:])
        last = int(np.searchsorted(starts, end - 1, side="right")) - 1
        goes_on = int(order[last]) if starts[last + 1] > end else None
        return Pick(start, order[touched].tolist(), rows, places, goes_on)

    def _lay_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The groups in the order of an epoch, and where each begins; one more for where the last one ends."""
        known = self._layout
        if known is None or known[0] != epoch:
            order = permutation(len(self.sizes), derive(self.seed, "row groups", epoch))
            known = epoch, order, np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes[order])])
            self._layout = known  # in one assignment: several streams of a worker read at the same time
        return known[1], known[2]
