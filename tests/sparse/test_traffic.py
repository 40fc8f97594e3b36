"""What workers send each other: no more messages than the exchanges need, and every row once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nestpipe import (
    SGD,
    Batch,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    TrainPipeline,
    World,
)
from nestpipe.comm.exchange import PIECE_BYTES, Exchange
from workers import run


class Several(nn.Module):
    """`tables` tables whose dimensions cycle through `dims`."""

    def __init__(self, tables: int, dims: list[int]) -> None:
        super().__init__()
        configs = [EmbeddingBagConfig(f"t{n}", dims[n % len(dims)], [f"f{n}"]) for n in range(tables)]
        self.sparse = EmbeddingBagCollection(configs)
        self.sequence = EmbeddingCollection([EmbeddingConfig("s", dims[0], ["f0"])])
        self.tables = tables

    def forward(self, batch: Batch) -> tuple[Tensor, None]:
        pooled = self.sparse(batch.sparse_features).values()
        return pooled.square().mean() + self.sequence(batch.sparse_features)["f0"].values().square().mean(), None


def many_ids(tables: int, count: int, hot: int, rank: int) -> Batch:
    random = np.random.default_rng([tables, rank])
    keys = (20_000 * random.random(tables * count * hot) ** 3).astype(np.int64)
    lengths = torch.full((tables * count,), hot)
    return Batch(KeyedJaggedTensor([f"f{n}" for n in range(tables)], torch.from_numpy(keys), lengths=lengths))


def count_exchanges(world: World, tables: int, dims: list[int], micro_batches: int) -> dict[str, int]:
    """Calls of `exchange` by lane, and all-reduces, in the second of two batches."""
    pipeline = TrainPipeline(Several(tables, dims), None, SGD(), micro_batches=micro_batches, world=world)
    counts: dict[str, int] = {}

    class Counting(Exchange):
        def exchange(self, *args: Any) -> None:
            if self.lane != "dense":  # a sum over two workers is an exchange too
                counts[self.lane] = counts.get(self.lane, 0) + 1
            super().exchange(*args)

        def all_reduce(self, *args: Any) -> None:
            counts["reduced"] = counts.get("reduced", 0) + 1
            super().all_reduce(*args)

    for exchange in (pipeline.sparse._route_exchange, pipeline.sparse._row_exchange, pipeline.dense.exchange):
        exchange.__class__ = Counting
    batches = iter([many_ids(tables, 8, 2, world.rank) for _ in range(2)])
    pipeline.progress(batches)
    counts.clear()
    pipeline.progress(batches)
    return counts


@pytest.mark.parametrize(
    ("tables", "dims", "micro_batches"), [(1, [4], 1), (6, [4], 4), (7, [3, 4, 5], 4), (3, [4, 8], 8)]
)
def test_exchanges_do_not_grow_with_tables(tables: int, dims: list[int], micro_batches: int) -> None:
    """Promise: a batch has one exchange of headers and one of keys, a micro-batch one of rows and one of gradients."""
    for counts in run(2, count_exchanges, tables, dims, micro_batches):
        # without dense parameters the one all-reduce is that of `agree`
        assert counts == {"route": 2, "network": 2 * micro_batches, "reduced": 1}


def count_bytes(world: World, micro_batches: list[int]) -> tuple[list[int], int]:
    """Bytes of rows and gradients sent for one batch with each number of micro-batches, and the largest piece."""
    sent, biggest = [], 0
    for count in micro_batches:
        pipeline = TrainPipeline(Several(3, [64, 8]), None, SGD(), micro_batches=count, world=world)
        exchange = pipeline.sparse._row_exchange
        traffic, split = type(exchange.traffic)(), exchange._pieces

        def measuring(tensors: Any, split: Any = split) -> list[Tensor]:
            nonlocal biggest
            pieces: list[Tensor] = split(tensors)
            biggest = max(biggest, *(piece.numel() * piece.element_size() for piece in pieces), 0)
            return pieces

        exchange.traffic, exchange._pieces = traffic, measuring  # type: ignore[method-assign]
        pipeline.progress(iter([many_ids(3, 2048, 4, world.rank)]))
        sent.append(traffic.bytes_sent)
    return sent, biggest


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_bytes_do_not_grow_with_micro_batches(workers: int) -> None:
    """Promise: a row is sent once per window: 8 micro-batches send as much as 1, and no piece is above 1 MB."""
    for sent, biggest in run(workers, count_bytes, [1, 8]):
        assert sent[0] > 2 * PIECE_BYTES, "enough to be split"
        assert sent[1] == pytest.approx(sent[0], rel=0.01)
        assert 0 < biggest <= PIECE_BYTES <= 1_000_000


def expected_rows(world: World) -> tuple[int, int]:
    """Bytes sent for rows and gradients, and what unique keys alone would need."""
    pipeline = TrainPipeline(Several(3, [64, 8]), None, RowWiseAdagrad(), micro_batches=4, world=world)
    traffic = pipeline.sparse._row_exchange.traffic = type(pipeline.sparse.traffic)()
    seen = []
    grad = pipeline.engine._stages["grad"]

    def spying(context: Any, micro: int) -> None:
        if micro == 0:
            for group, window, plan in zip(pipeline.sparse.groups, context.routes.windows, context.routes.owned):
                foreign = sum(
                    window.first_range(m, p)[1] - window.first_range(m, p)[0] for m in range(4) for p in others
                )
                asked = len(plan.embed_rows) - (len(window) - foreign)
                seen.append((foreign + asked) * group.row_bytes)
        grad(context, micro)

    others = [p for p in range(world.size) if p != world.rank]
    pipeline.engine._stages["grad"] = spying
    pipeline.progress(iter([many_ids(3, 64, 4, world.rank)]))
    return traffic.bytes_sent, sum(seen)


def test_a_worker_sends_each_unique_row_once_and_its_own_never() -> None:
    """Promise: a worker sends the unique rows others want, and gradients of the unique rows it wants, no more."""
    for sent, wanted in run(3, expected_rows):
        assert sent == wanted
