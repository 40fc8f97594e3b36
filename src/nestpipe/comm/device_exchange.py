"""Collectives on a device's own tensors: NCCL, HCCL, or the simulated wire.

A collective is issued to the lane's stream and waited for by streams.  So the host does not notice a worker that has
died or stalled: `CollectiveWatch` polls, and ends the group when a collective is overdue or broken.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from nestpipe.comm.errors import PeerLost
from nestpipe.comm.exchange import Shared, Traffic, Transfer, lost, next_in_ring, waited_in_vain
from nestpipe.comm.members import Members
from nestpipe.comm.world import World
from nestpipe.device import doing

POLL_SECONDS = 0.05


class CollectiveWatch:
    """Notices collectives that do not end.  One for all groups of a device."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pending: deque[tuple[dist.Work, float, str]] = deque()
        self._groups: list[dist.ProcessGroup] = []
        self._news = threading.Event()
        self._ended = False
        self.lost: PeerLost | None = None
        """What became of a collective that did not end."""
        self.on_lost: Callable[[PeerLost], None] = lambda error: None
        """Called once, on the watch's own thread, before the groups are ended."""
        threading.Thread(target=self._run, name="nestpipe-watch", daemon=True).start()

    def add_group(self, group: dist.ProcessGroup) -> None:
        self._groups.append(group)

    def add(self, work: dist.Work) -> None:
        self._pending.append((work, time.monotonic(), doing.in_words()))
        self._news.set()

    def close(self) -> None:
        self._ended = True
        self._news.set()

    def _run(self) -> None:
        while not self._ended:
            if not self._pending:
                self._news.wait()
                self._news.clear()
                continue
            work, since, what = self._pending[0]
            error = self._error_of(work, since)
            if error is not None:
                self.lost = PeerLost(f"{what}: {error}")
                self._pending.clear()
                self._end(self.lost)
            elif work.is_completed():
                self._pending.popleft()
            else:
                time.sleep(POLL_SECONDS)

    def behind(self, error: BaseException) -> BaseException:
        """The lost worker behind an error of the device, if there is one: a host that waits may meet it before this watch."""
        for work, since, what in [] if self.lost else list(self._pending):
            found = self._error_of(work, since)
            if found is not None:
                return PeerLost(f"{what}: {found}")
        return self.lost or error

    def _error_of(self, work: dist.Work, since: float) -> PeerLost | None:
        failed = _exception_of(work)
        if failed is not None:
            text = str(failed).lower()
            late = "timed out" in text or "timeout" in text
            return waited_in_vain(self._world) if late else lost(self._world)
        overdue = time.monotonic() - since > self._world.timeout and not work.is_completed()
        return waited_in_vain(self._world) if overdue else None

    def _end(self, error: PeerLost) -> None:
        self.on_lost(error)
        for group in self._groups:
            with contextlib.suppress(Exception):  # it may have ended by itself
                group.abort()


class DeviceExchange:
    """The collectives of one lane.  One thread issues those of all lanes, in the same order on every worker."""

    def __init__(
        self, world: Members, lane: str, group: dist.ProcessGroup, watch: CollectiveWatch, traffic: Traffic
    ) -> None:
        """`world`: the members of `group`."""
        self.world, self.lane, self.group, self.traffic = world, lane, group, traffic
        self._watch = watch
        watch.add_group(group)

    def exchange_rows(self, transfers: Sequence[Transfer]) -> None:
        """Sends all rows to the workers they are for, and fills those that come from them."""
        for transfer in transfers:
            row = transfer.send.element_size() * transfer.send.shape[1]
            sizes = enumerate(transfer.send_sizes)
            self._issue(
                dist.all_to_all_single,
                transfer.receive,
                transfer.send,
                transfer.receive_sizes,
                transfer.send_sizes,
                sent={self.world.run_rank(p): row * count for p, count in sizes if p != self.world.rank},
            )

    def share_rows(self, shared: Sequence[Shared]) -> None:
        """Sends this worker's rows to all others, and fills those that come from them."""
        size, me = self.world.size, self.world.rank
        for one in shared:
            own = one.rows.split(one.sizes)[me].repeat(size, 1)
            self.exchange_rows([Transfer(own, one.rows, [one.sizes[me]] * size, one.sizes)])

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> None:
        """In place.  Every worker ends with the same bits."""
        sent = tensor.numel() * tensor.element_size()
        self._issue(dist.all_reduce, tensor, op, sent={next_in_ring(self.world): sent})

    def _issue(self, collective: Any, *args: Any, sent: Mapping[int, int]) -> None:
        work = collective(*args, group=self.group, async_op=True)
        self._watch.add(work)
        work.wait()  # the stream waits, not the host
        self.traffic.add(self.lane, sent, 1)


def _exception_of(work: dist.Work) -> BaseException | None:
    """What broke a collective; backends tell it by value or by raising it."""
    try:
        failed: BaseException | None = work.exception()
    except Exception as error:
        return error
    return failed
