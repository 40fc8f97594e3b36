"""The batches of a stream as units of an indexed source, without reading a sample: of equal count, or filled to a token budget.

Where a batch begins and ends, and the position after it, is as `Stream` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nestpipe.data.position import Position
from nestpipe.data.source import IndexedSource, Interval

LOOK = 4096
"""Samples whose lengths are looked at together."""


@dataclass(frozen=True)
class Run:
    """One batch of a stream."""

    epoch: int
    units: np.ndarray
    after: Position


Fill = Callable[[Position, Sequence[Interval]], Iterator[Run]]
"""The batches of the rest of one epoch."""


def counted_runs(intervals: Sequence[Interval], epochs: int | None, at: Position, size: int) -> Iterator[Run]:
    """Batches of `size` samples; the last one of an epoch may be short."""
    return _all_epochs(intervals, epochs, at, lambda start, rest: _counted(start, rest, size))


def token_runs(
    source: IndexedSource, intervals: Sequence[Interval], epochs: int | None, at: Position, budget: int
) -> Iterator[Run]:
    """Batches of at most `budget` tokens; a sample that is above it alone is a batch of its own."""
    return _all_epochs(intervals, epochs, at, lambda start, rest: _filled(source, start, rest, budget))


def _all_epochs(intervals: Sequence[Interval], epochs: int | None, at: Position, fill: Fill) -> Iterator[Run]:
    epoch = at.epoch
    while intervals and (epochs is None or epoch < epochs):
        yield from fill(at if epoch == at.epoch else Position(epoch), intervals)
        epoch += 1


def _rest(at: Position, intervals: Sequence[Interval]) -> Iterator[tuple[int, int, int]]:
    """The intervals from a position on, with their numbers."""
    for number in range(at.interval, len(intervals)):
        start, stop = intervals[number]
        if number == at.interval and at.unit >= 0:
            start = at.unit
        yield number, start, stop


def _counted(at: Position, intervals: Sequence[Interval], size: int) -> Iterator[Run]:
    held: list[np.ndarray] = []
    count, now = 0, at
    for number, start, stop in _rest(at, intervals):
        while start < stop:
            take = min(stop - start, size - count)
            held.append(np.arange(start, start + take))
            start, count = start + take, count + take
            now = Position(at.epoch, number, start)
            if count == size:
                yield Run(at.epoch, np.concatenate(held), now)
                held, count = [], 0
    if held:
        yield Run(at.epoch, np.concatenate(held), now)


def _filled(source: IndexedSource, at: Position, intervals: Sequence[Interval], budget: int) -> Iterator[Run]:
    held: list[np.ndarray] = []
    tokens, now = 0, at
    for number, start, stop in _rest(at, intervals):
        while start < stop:
            units = np.arange(start, min(stop, start + LOOK))
            ends = tokens + np.cumsum(source.lengths(units, at.epoch))
            fit = int(np.searchsorted(ends, budget, side="right"))
            if not fit and not held:
                fit = 1
            if fit:
                held.append(units[:fit])
                start, tokens = start + fit, int(ends[fit - 1])
                now = Position(at.epoch, number, start)
            if fit < len(units):
                yield Run(at.epoch, np.concatenate(held), now)
                held, tokens = [], 0
    if held:
        yield Run(at.epoch, np.concatenate(held), now)
