"""Messages between workers: whole and in order whatever their size, and an error that says who is missing when one is."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nestpipe import SGD
from nestpipe.comm.errors import PeerLost
from nestpipe.comm.exchange import PIECE_BYTES, Exchange
from nestpipe.comm.world import World
from nestpipe.sparse.batch_context import BatchContext
from training import Setting, make_pipeline, my_batches
from workers import Died, run, run_once

SETTING = Setting("dlrm", SGD(), micro_batches=2, steps=6)


# Exchanges


def filled(sender: int, receiver: int, number: int, size: int) -> torch.Tensor:
    """Bytes that say where they come from, where they go, and their place."""
    return (torch.arange(size) * 7 + sender * 31 + receiver * 57 + number * 101).to(torch.uint8)


class Measured:
    """A process group that notes the largest tensor sent through it."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.biggest = 0

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        self.biggest = max(self.biggest, *(tensor.numel() * tensor.element_size() for tensor in tensors))
        return self._group.send(tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> dist.Work:
        return self._group.recv(tensors, peer, tag)


def exchange_sizes(world: World, rounds: list[list[int]]) -> tuple[list[bool], int, int, int]:
    """Exchanges messages of these sizes between all pairs; whether each round came whole, and what was counted."""
    exchange = Exchange(world, "network")
    forth, back = Measured(exchange.group), Measured(exchange._back)
    exchange.group, exchange._back = forth, back
    good = []
    for sizes in rounds:
        # what rank s sends to r depends on both: an asymmetric all-to-all
        def count(size: int, sender: int, receiver: int) -> int:
            return max(0, size - sender * 3 - receiver)

        peers = range(world.size)
        sends = [[filled(world.rank, p, n, count(s, world.rank, p)) for n, s in enumerate(sizes)] for p in peers]
        receives = [[torch.zeros(count(s, p, world.rank), dtype=torch.uint8) for s in sizes] for p in peers]
        exchange.exchange(sends, receives)
        wanted = [[filled(p, world.rank, n, count(s, p, world.rank)) for n, s in enumerate(sizes)] for p in peers]
        others = [p for p in peers if p != world.rank]
        good.append(all(torch.equal(a, b) for p in others for a, b in zip(receives[p], wanted[p])))
        good.append(not any(t.any() for t in receives[world.rank]))  # its own part is left alone
    return good, exchange.traffic.bytes_sent, exchange.traffic.messages, max(forth.biggest, back.biggest)


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_messages_of_any_size_come_whole(workers: int) -> None:
    """Promise: empty messages, and sizes around the limit of a piece, arrive whole; no piece is above 1 MB."""
    limit = PIECE_BYTES
    rounds = [[0], [], [1, 0, 2], [limit - 1], [limit], [limit + 1], [2 * limit, 5], [limit + 9, limit + 9, 0], [10]]
    for rank, (good, sent, _, biggest) in enumerate(run(workers, exchange_sizes, rounds)):
        assert all(good), f"rank {rank}"
        peers = [p for p in range(workers) if p != rank]
        assert sent == sum(max(0, s - rank * 3 - p) for sizes in rounds for s in sizes for p in peers)
        assert limit - 20 <= biggest <= limit <= 1_000_000


def reduce_some(world: World) -> tuple[bytes, float]:
    values = drawn(world.rank)
    Exchange(world, "dense").all_reduce(values)
    smallest = torch.tensor([float(world.rank) - 5])
    Exchange(world, "dense").all_reduce(smallest, dist.ReduceOp.MIN)
    return values.numpy().tobytes(), float(smallest)


def drawn(rank: int) -> torch.Tensor:
    torch.manual_seed(rank)
    return torch.randn(400_001)  # more than a piece


@pytest.mark.parametrize("workers", [2, 3])
def test_all_reduce_gives_every_worker_the_same_bits(workers: int) -> None:
    """Promise: what is reduced is the sum of all, and the same on every worker, bit for bit."""
    results = run(workers, reduce_some)
    assert len({values for values, _ in results}) == 1
    assert [smallest for _, smallest in results] == [-5.0] * workers
    summed = torch.frombuffer(bytearray(results[0][0]), dtype=torch.float32)
    assert torch.allclose(summed, sum((drawn(rank) for rank in range(1, workers)), drawn(0)), atol=1e-5)


def sum_late(world: World, lane: str) -> float:
    """Worker 1 comes later than workers wait for one another."""
    time.sleep(2.5 * world.rank)
    total = torch.ones(1)
    Exchange(world, lane).all_reduce(total)
    return float(total)


@pytest.mark.slow
def test_sums_of_checkpoints_have_the_patience_of_their_lane() -> None:
    """Promise: a timeout of 1 s is for workers that do not answer, not for those that read a checkpoint."""
    assert run_once(2, sum_late, "checkpoint", timeout=1.0) == [2.0, 2.0]


def test_a_single_worker_talks_to_nobody() -> None:
    """Promise: one worker needs no process group, and its exchanges do nothing."""
    exchange = Exchange(World.single(), "route")
    exchange.exchange([[torch.ones(3)]], [[torch.ones(3)]])
    exchange.all_reduce(torch.ones(3))
    assert exchange.traffic.bytes_sent == exchange.traffic.messages == 0


# Faults


class Stalled(Exception):
    """The stalled worker has woken up again, and the test is over for it."""


def happen(how: str) -> None:
    """What becomes of the victim."""
    if how == "exit":
        os._exit(7)
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        time.sleep(6)
        raise Stalled


def train_until_lost(world: World, victim: int, stage: str, how: str) -> str:
    """Trains until worker `victim` is stopped at a stage of batch 3: the error here."""
    pipeline = make_pipeline(world, SETTING)
    batches = my_batches(world, SETTING)
    original = pipeline.engine._stages[stage]

    def stopping(context: BatchContext, micro: int) -> None:
        if context.number == 3:
            happen(how)
        original(context, micro)

    if world.rank == victim:
        pipeline.engine._stages[stage] = stopping
    try:
        while pipeline.progress(batches) is not None:
            pass
    except Stalled:
        return "stalled"
    except PeerLost as error:
        return str(error)
    return "no error"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "how", "stage", "noticed"),
    [
        (2, "exit", "load", "route"),
        pytest.param(3, "kill", "route", "route", marks=pytest.mark.slow),
        pytest.param(3, "exit", "compute", "(embed|grad)", marks=pytest.mark.slow),
        (2, "kill", "reduce", "reduce"),
        pytest.param(3, "kill", "reduce", "reduce", marks=pytest.mark.slow),
    ],
)
def test_a_dead_worker_is_named_at_once(workers: int, how: str, stage: str, noticed: str) -> None:
    """Promise: when a worker dies, all others stop, however patient they are, with an error that names stage, batch and rank."""
    results = run_once(workers, train_until_lost, 1, stage, how, timeout=600.0, deadline=60.0)
    assert results[1] == Died(7 if how == "exit" else -signal.SIGKILL)
    others = [result for rank, result in enumerate(results) if rank != 1]
    ring = noticed == "reduce" and workers > 2  # and does not say whom it waits for
    who = "another worker" if ring else r"rank \d"
    for text in others:
        assert re.match(rf"{noticed} of batch 3: rank \d lost {who}: it ended", text), text
    assert ring or any("lost rank 1" in text for text in others), others


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "stage", "noticed"),
    [(2, "load", "route"), (3, "compute", "(embed|grad)"), (2, "reduce", "reduce"), (3, "reduce", "reduce")],
)
def test_a_stalled_worker_is_named_after_the_deadline(workers: int, stage: str, noticed: str) -> None:
    """Promise: when a worker stalls, the others stop after the deadline, naming stage, batch and whom they waited for."""
    results = run_once(workers, train_until_lost, 1, stage, "stall", timeout=3.0)
    who = "another worker" if noticed == "reduce" and workers > 2 else "rank 1"
    others = [result for rank, result in enumerate(results) if rank != 1]
    for text in others:
        assert re.match(rf"{noticed} of batch 3: rank \d (waited 3 s for|lost)", text), text
    assert any(f"waited 3 s for {who}" in text for text in others), others
