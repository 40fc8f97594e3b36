"""All-to-all of byte ranges, and all-reduce.  Each has a deadline, and its error names the worker that did not answer.

A large all-to-all of gloo runs half-duplex.  So messages go from worker to worker here, in pieces with several in
flight, and each direction between two workers has a connection of its own (docs/log.md).  Sender and receiver both know
the size of a message, so they cut it the same way without agreeing first.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nestpipe.comm.errors import PeerLost
from nestpipe.comm.members import Members

PIECE_BYTES = 1000 * 1000


class Traffic:
    """Counts the bytes and messages that this worker sent: in all, and by lane and receiver."""

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.messages = 0
        self._sent: Counter[tuple[str, int]] = Counter()
        self._lock = threading.Lock()

    def add(self, lane: str, sent: Mapping[int, int], messages: int) -> None:
        """`sent`: bytes by the rank in the run that they went to."""
        with self._lock:
            self.bytes_sent += sum(sent.values())
            self.messages += messages
            for rank, count in sent.items():
                self._sent[lane, rank] += count

    def by_rank(self, lane: str | None = None) -> dict[int, int]:
        """Bytes by the rank that they went to, on one lane or on all."""
        found: Counter[int] = Counter()
        with self._lock:
            for (name, rank), count in self._sent.items():
                found[rank] += count if lane in (None, name) else 0
        return dict(found)


@dataclass(frozen=True)
class Transfer:
    """Rows for all workers, one worker after another, and memory for those that come from them.  This worker is one of them."""

    send: Any
    """Array [n, D]: of numpy on the host, a tensor on a device."""
    receive: Any
    send_sizes: list[int]
    """Rows for every worker."""
    receive_sizes: list[int]


@dataclass(frozen=True)
class Shared:
    """Rows of all members, one after another: this worker's own, which all others get, and memory for theirs."""

    rows: Any
    """Array [n, D]: of numpy on the host, a tensor on a device."""
    sizes: list[int]
    """Rows of every member."""


def waited_in_vain(members: Members, who: str = "another worker") -> PeerLost:
    me = members.run_rank(members.rank)
    return PeerLost(f"rank {me} waited {members.timeout:g} s for {who}; raise --timeout if it was only slow")


def lost(members: Members, who: str = "another worker") -> PeerLost:
    return PeerLost(f"rank {members.run_rank(members.rank)} lost {who}: it ended or its connection broke")


def next_in_ring(members: Members) -> int:
    """The rank in the run to which a ring, as gloo's, sends."""
    return members.run_rank((members.rank - 1) % members.size)


class Exchange:
    """The messages of one lane.  One thread issues all calls, in the same order on every worker."""

    def __init__(
        self, world: Members, lane: str, traffic: Traffic | None = None, piece_bytes: int = PIECE_BYTES
    ) -> None:
        """`world`: all workers, or those of them that take part."""
        self.world = world
        self.lane = lane
        self.group = world.groups.get(lane)
        self._back = world.groups.get(f"{lane} back", self.group)
        """Carries messages to lower ranks."""
        self.traffic = traffic or Traffic()
        self.piece_bytes = piece_bytes
        self._deadline = timedelta(seconds=world.timeout)

    def exchange(self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]]) -> None:
        """Sends sends[p] to worker p and fills receives[p] from worker p.  Ignores this worker's own entries.

        Tensors are contiguous.  For each pair of workers, both sides list the same sizes in the same order.
        """
        if self.world.size == 1:
            return
        assert self.group is not None and self._back is not None
        me = self.world.rank
        pending: list[tuple[int, dist.Work]] = []
        peer = -1
        try:
            # Start with the next rank and go round, so that not all workers send to worker 0 first.
            for distance in range(1, self.world.size):
                peer = (me - distance) % self.world.size
                group = self.group if peer < me else self._back
                pending.extend((peer, group.recv([piece], peer, 0)) for piece in self._pieces(receives[peer]))
                peer = (me + distance) % self.world.size
                group = self.group if me < peer else self._back
                pending.extend((peer, group.send([piece], peer, 0)) for piece in self._pieces(sends[peer]))
            for waited_for, work in pending:
                peer = waited_for
                work.wait(self._deadline)
        except RuntimeError as error:
            raise self._lost(peer, error) from None
        sent = {
            self.world.run_rank(p): sum(t.numel() * t.element_size() for t in ts)
            for p, ts in enumerate(sends)
            if p != me
        }
        self.traffic.add(self.lane, sent, len(pending))

    def exchange_rows(self, transfers: Sequence[Transfer]) -> None:
        """Sends all rows to the workers they are for."""
        size, me = self.world.size, self.world.rank
        sends: list[list[Tensor]] = [[] for _ in range(size)]
        receives: list[list[Tensor]] = [[] for _ in range(size)]
        for transfer in transfers:
            out = _as_tensor(transfer.send).split(transfer.send_sizes)
            into = _as_tensor(transfer.receive).split(transfer.receive_sizes)
            into[me].copy_(out[me])
            for peer in range(size):
                sends[peer].append(out[peer])
                receives[peer].append(into[peer])
        self.exchange(sends, receives)

    def share_rows(self, shared: Sequence[Shared]) -> None:
        """Sends this worker's rows to all others, and fills those that come from them."""
        size, me = self.world.size, self.world.rank
        sends: list[list[Tensor]] = [[] for _ in range(size)]
        receives: list[list[Tensor]] = [[] for _ in range(size)]
        for one in shared:
            parts = _as_tensor(one.rows).split(one.sizes)
            for peer in range(size):
                sends[peer].append(parts[me])
                receives[peer].append(parts[peer])
        self.exchange(sends, receives)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> None:
        """In place.  Every worker ends with the same bits."""
        if self.world.size == 1:
            return
        two_ways = self._back is not self.group  # the other lanes are not built for speed
        if self.world.size == 2 and two_ways and op == dist.ReduceOp.SUM:
            self._sum_with_other(tensor)
            return
        try:
            dist.all_reduce(tensor, op, group=self.group)
        except RuntimeError as error:
            raise self._lost(None, error) from None
        ring = 2 * (self.world.size - 1) / self.world.size
        sent = int(ring * tensor.numel() * tensor.element_size())
        self.traffic.add(self.lane, {next_in_ring(self.world): sent}, 1)

    def _sum_with_other(self, tensor: Tensor) -> None:
        """Sums with the other of two workers.  A ring would move the same bytes in two rounds, one after the other."""
        assert tensor.is_contiguous()
        other = 1 - self.world.rank
        theirs = torch.empty_like(tensor)
        nothing: list[Tensor] = []
        self.exchange(
            [[tensor] if peer == other else nothing for peer in range(2)],
            [[theirs] if peer == other else nothing for peer in range(2)],
        )
        tensor.add_(theirs)  # a + b and b + a are the same bits, except for two NaNs

    def _pieces(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        pieces: list[Tensor] = []
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if size > self.piece_bytes:
                pieces.extend(tensor.view(torch.uint8).flatten().split(self.piece_bytes))
            elif size:
                pieces.append(tensor)
        return pieces

    def _lost(self, peer: int | None, error: RuntimeError) -> PeerLost:
        who = "another worker" if peer is None else f"rank {self.world.run_rank(peer)}"
        text = str(error).lower()
        late = "timed out" in text or "timeout" in text
        return waited_in_vain(self.world, who) if late else lost(self.world, who)


def _as_tensor(array: Any) -> Tensor:
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array
