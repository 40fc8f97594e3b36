"""`data.balance = "tokens"`: batches that are filled to a token budget, each from its own stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from nestpipe.data.balance.runs import token_runs
from nestpipe.data.batch import Batch
from nestpipe.data.position import Position
from nestpipe.data.source import IndexedSource
from nestpipe.data.stream import Stream


class TokenStream(Stream):
    """As `Stream`, with batches of at most `budget` tokens.  A sample that is above it alone is a batch of its own.

    The `costs` of a batch are its tokens.
    """

    def __init__(
        self,
        source: IndexedSource,
        budget: int,
        *,
        rank: int = 0,
        workers: int = 1,
        epochs: int | None = 1,
        position: Position | None = None,
        read_ahead: int = 4,
    ) -> None:
        super().__init__(source, 1, rank=rank, workers=workers, epochs=epochs, position=position, read_ahead=read_ahead)
        if budget < 1:
            raise ValueError(f"data.token_budget must be at least 1, not {budget}")
        self.indexed, self.budget = source, budget

    def _batches(self, at: Position) -> Iterator[tuple[Batch, Position]]:
        for run in token_runs(self.indexed, self.intervals, self.epochs, at, self.budget):
            tokens = torch.from_numpy(self.indexed.lengths(run.units, run.epoch)).double()
            yield replace(self.indexed.take(run.units, run.epoch), costs=tokens), run.after
