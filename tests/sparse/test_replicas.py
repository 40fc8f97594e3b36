"""What replicas know of a batch: the union of all groups' keys, in one order, and who adds what when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.keys.window import Window, plan_window, run_of
from nestpipe.sparse.routing import NO_DATA, Routes, route

Uses = list[list[list[int]]]
"""Per worker and micro-batch: keys; a key's table is key % 2."""


class Members:
    """Some of the workers, which are threads here."""

    def __init__(self, number: int, ranks: Sequence[int]) -> None:
        self.ranks, self.rank, self.size = list(ranks), list(ranks).index(number), len(ranks)


class Desk:
    """Where threads leave messages for each other."""

    def __init__(self, parties: int) -> None:
        self.left: dict[tuple[str, int, int], list[torch.Tensor]] = {}
        self.all_here = threading.Barrier(parties, timeout=20)


class InProcess:
    """An exchange between threads."""

    def __init__(self, desk: Desk, members: Members, lane: str) -> None:
        self.desk, self.world, self.lane = desk, members, lane

    def exchange(self, sends: Sequence[Sequence[torch.Tensor]], receives: Sequence[Sequence[torch.Tensor]]) -> None:
        me = self.world.ranks[self.world.rank]
        for peer, tensors in zip(self.world.ranks, sends):
            self.desk.left[self.lane, me, peer] = [tensor.clone() for tensor in tensors]
        self.desk.all_here.wait()
        for peer, into in zip(self.world.ranks, receives):
            for target, found in zip(into, self.desk.left[self.lane, peer, me], strict=True):
                if peer != me:
                    assert target.shape == found.shape
                    target.copy_(found)
        self.desk.all_here.wait()


def window_of(micros: list[list[int]], workers: int) -> Window:
    """One segment per micro-batch and table."""
    parts = [(m, t, [key for key in keys if key % 2 == t]) for m, keys in enumerate(micros) for t in (0, 1)]
    keys = np.array([key for _, _, some in parts for key in some], np.int64)
    ends = np.cumsum([len(some) for _, _, some in parts])
    tables = np.array([t for _, t, _ in parts], np.uint16)
    return plan_window(keys, ends, tables, np.array([m for m, _, _ in parts], np.int32), len(micros), workers)


def routed(uses: Uses, size: int) -> list[Routes]:
    """What `route` gives to every worker."""
    workers, micros = len(uses), len(uses[0])
    desk = Desk(workers)
    found: list[Any] = [None] * workers

    def work(rank: int) -> None:
        first = rank - rank % size
        inside = InProcess(desk, Members(rank, range(first, first + size)), "shard")
        between = InProcess(desk, Members(rank, range(rank % size, workers, size)), "replicas")
        count = sum(map(len, uses[rank]))
        found[rank] = route(
            [window_of(uses[rank], size)], float(count), count or NO_DATA, micros, inside, 100.0 + rank, between  # type: ignore[arg-type]
        )  # fmt: skip

    in_threads([lambda rank=rank: work(rank) for rank in range(workers)])
    return found


def in_threads(jobs: list[Callable[[], None]]) -> None:
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@st.composite
def grouped(draw: st.DrawFn) -> tuple[Uses, int]:
    """Keys of workers in groups: any, none on some workers, none in a whole group, one key in all."""
    groups, size, micros = draw(st.integers(2, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pool = draw(st.sampled_from([[7], list(range(6)), [-(2**63), 2**63 - 1, *range(20)]]))
    keys = st.lists(st.sampled_from(pool), max_size=6)
    uses = [[draw(keys) for _ in range(micros)] for _ in range(groups * size)]
    empty = draw(st.sampled_from([None, *range(groups)]))
    if empty is not None:
        uses[empty * size : (empty + 1) * size] = [[[] for _ in range(micros)] for _ in range(size)]
    return uses, size


@settings(max_examples=120, deadline=None)
@given(grouped())
def test_the_union(drawn: tuple[Uses, int]) -> None:
    """Promise: every owner has each key that any group touches once, in the same order as its replicas, and knows for every
    group in which micro-batch each key is used last; loss terms, samples and the end of the data are those of all workers."""
    uses, size = drawn
    found = routed(uses, size)
    micros = len(uses[0])
    everything = {key for worker in uses for keys in worker for key in keys}
    count = sum(len(keys) for worker in uses for keys in worker)
    owned = [found[shard].owned[0].keys.tolist() for shard in range(size)]
    assert sorted(key for keys in owned for key in keys) == sorted(everything)
    for rank, routes in enumerate(found):
        plan = routes.owned[0]
        assert (routes.terms, routes.samples, routes.ended, routes.seconds) == (float(count), count, not count, 100.0)
        assert plan.keys.tolist() == owned[rank % size] and (plan.tables == plan.keys % 2).all()
        assert plan.replicas is not None
        for group in range(len(uses) // size):
            workers = uses[group * size : (group + 1) * size]
            for micro in range(micros):
                start, stop = run_of(plan.replicas.ends, micro, group)
                last = plan.keys[plan.replicas.rows[start:stop]].tolist()
                wanted = {
                    key
                    for key in plan.keys.tolist()
                    if micro
                    == max((m for worker in workers for m, keys in enumerate(worker) if key in keys), default=-1)
                }
                assert len(last) == len(set(last)) and set(last) == wanted
                assert plan.replicas.sizes[micro][group] == len(last)


@settings(max_examples=60, deadline=None)
@given(grouped())
def test_rows_are_served_inside_the_group(drawn: tuple[Uses, int]) -> None:
    """Promise: what an owner sends, and what gradients it takes, are rows that workers of its own group asked it for."""
    uses, size = drawn
    found = routed(uses, size)
    for rank, routes in enumerate(found):
        plan, first = routes.owned[0], rank - rank % size
        for member in range(size):
            window = found[first + member].windows[0]
            for micro in range(len(uses[0])):
                for rows, ends, asked in (
                    (plan.embed_rows, plan.embed_ends, window.keys[slice(*window.first_range(micro, rank - first))]),
                    (
                        plan.grad_rows,
                        plan.grad_ends,
                        window.keys[window.last_order[slice(*window.last_range(micro, rank - first))]],
                    ),
                ):
                    start, stop = run_of(ends, micro, member)
                    assert plan.keys[rows[start:stop]].tolist() == asked.tolist()
