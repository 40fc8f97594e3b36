"""The device itself: one queue per stream, and the rules by which their items run.  One lock guards all of it.

Nothing of a queue runs on its own.  In order "late" an item runs only when a host thread waits for it, itself or through
the events of other streams.  "random" also runs pieces of queues, by a seed, whenever something is issued.  "eager" runs
everything at once.  All three keep the order within a stream and the waits for events, so a program with the right waits
cannot tell them apart.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from nestpipe.device import compute_threads
from nestpipe.device.sim.faults import DeviceFault
from nestpipe.device.sim.sites import Site, site

Order = Literal["late", "random", "eager"]
Clock = dict[int, int]
"""For each stream, up to which of its items something is known to come after."""
PACES = (0.0, 0.0, 0.4, 1.0, 3.0)
"""In random order a stream runs this many items, on average, per item issued anywhere; drawn anew now and then."""


def merge(into: Clock, other: Clock) -> None:
    for stream, position in other.items():
        if into.get(stream, 0) < position:
            into[stream] = position


class Kernel:
    """An item that computes or copies; runs once, under the lock."""

    __slots__ = ("name", "run", "site")

    def __init__(self, name: str, site: Site, run: Callable[[], object]) -> None:
        self.name = name
        self.site = site
        self.run = run


class Wait:
    """An item that is over when another stream has done its first `at` items."""

    __slots__ = ("at", "queue")

    def __init__(self, queue: Queue, at: int) -> None:
        self.queue = queue
        self.at = at


class Transfer(Kernel):
    """A kernel that cannot run before somebody outside, a thread of a wire group, has settled it."""

    __slots__ = ("settled",)

    def __init__(self, name: str, site: Site, run: Callable[[], object]) -> None:
        super().__init__(name, site, run)
        self.settled = False


class Queue:
    """What is left to do on one stream.  `issued` and `done` count its items since the beginning."""

    __slots__ = ("clock", "done", "fault", "fault_at", "host_version", "issued", "items", "number", "pace")

    def __init__(self, number: int) -> None:
        self.number = number
        self.items: deque[Kernel | Wait] = deque()
        self.issued = 0
        self.done = 0
        self.clock: Clock = {}
        self.host_version = 0
        self.fault: DeviceFault | None = None
        self.fault_at = 0
        self.pace = 0.0

    def fail(self, fault: DeviceFault, position: int) -> None:
        """From item `position` on nothing of this stream runs; whoever waits for it is told."""
        if self.fault is None:
            self.fault, self.fault_at = fault, position

    def failed_by(self, at: int) -> DeviceFault | None:
        return self.fault if self.fault is not None and self.fault_at <= at else None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.stream = 0


class Machine:
    """Queues, clocks and counters.  Callers hold `lock`, except where a method says otherwise."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """A transfer was settled."""
        self.needed = threading.Condition(self.lock)
        """A host thread waits for a transfer."""
        self.thread = _Thread()
        self.streams = 0
        self.epoch = 0
        self.reset("late", 0, True, False)

    def reset(self, order: Order, seed: int, races: bool, shuffle_atomics: bool) -> None:
        """Forgets queues, clocks, faults and counts.  What was queued has been run by then."""
        self.epoch += 1
        self.order, self.races, self.shuffle_atomics = order, races, shuffle_atomics
        self.random = random.Random(f"order {seed}")
        self.shuffles = random.Random(f"atomics {seed}")
        self.queues: dict[int, Queue] = {}
        self.host_clock: Clock = {}
        self.host_version = 0
        self.fault: DeviceFault | None = None
        self.launches = 0
        self.host_syncs: dict[str, dict[str, int]] = {}

    # Streams

    def new_stream(self) -> int:
        self.streams += 1
        return self.streams

    def queue(self, number: int) -> Queue:
        """The queue of a stream, also of one made before the last reset."""
        found = self.queues.get(number)
        if found is None:
            found = self.queues[number] = Queue(number)
            found.pace = self.random.choice(PACES)
        return found

    def current(self) -> Queue:
        """The queue of the calling thread's current stream."""
        return self.queue(self.thread.stream)

    def clock_of(self, queue: Queue) -> Clock:
        """What the next item of a stream comes after: its own waits, and what the host has waited for."""
        if queue.host_version != self.host_version:
            merge(queue.clock, self.host_clock)
            queue.host_version = self.host_version
        return queue.clock

    # Issuing

    def put(self, queue: Queue, item: Kernel | Wait) -> None:
        queue.items.append(item)
        queue.issued += 1
        if self.order == "eager":
            with _plain_torch():
                while self._step(queue):
                    pass
        elif self.order == "random":
            self._run_some()

    def _run_some(self) -> None:
        draw = self.random.random
        if draw() < 0.03:
            for queue in self.queues.values():
                queue.pace = self.random.choice(PACES)
        for queue in list(self.queues.values()):
            count = int(queue.pace + draw()) if queue.items and queue.pace else 0
            if count:
                with _plain_torch():
                    for _ in range(count):
                        if not self._step(queue):
                            break

    # Running

    def advance(self, queue: Queue, at: int) -> None:
        """Runs what must be run until `queue` has done its first `at` items.  Gives up the lock while a transfer travels."""
        while queue.done < at:
            blocked = False
            with _plain_torch():
                while queue.done < at and not blocked:
                    blocked = not self.nudge(queue)
            if blocked:
                self.needed.notify_all()
                self.changed.wait(1.0)

    def nudge(self, queue: Queue) -> bool:
        """Runs one item that brings `queue` on, here or on a stream it waits for; False if none can run now."""
        while queue.items:
            head = queue.items[0]
            if isinstance(head, Wait) and head.queue.done < head.at:
                queue = head.queue
            else:
                return self._step(queue)
        return False

    def poll(self, queue: Queue, at: int) -> bool:
        """Whether the first `at` items are done.  Somebody who asks again and again makes them run in the end."""
        over = queue.done >= at
        if not over:
            with _plain_torch():
                self.nudge(queue)
        return over

    def settle(self, transfer: Transfer) -> None:
        """A wire thread has what arrived, or its error."""
        transfer.settled = True
        if self.order == "eager":
            with _plain_torch():
                while any([self._step(queue) for queue in self.queues.values()]):
                    pass
        self.changed.notify_all()

    def drain(self) -> None:
        """Runs everything that can be run without waiting for a transfer."""
        with _plain_torch():
            while any([self._step(queue) for queue in list(self.queues.values())]):
                pass

    def _step(self, queue: Queue) -> bool:
        """Runs the head of one queue; False if it is empty or its head must wait."""
        if not queue.items:
            return False
        head = queue.items[0]
        if isinstance(head, Wait):
            if head.queue.done < head.at:
                return False
        elif isinstance(head, Transfer) and not head.settled:
            return False
        queue.items.popleft()
        position = queue.done + 1
        try:
            if isinstance(head, Wait):
                fault = head.queue.failed_by(head.at)
                if fault is not None:
                    queue.fail(fault, position)
            elif queue.fault is None and self.fault is None:
                self._run(queue, head, position)
        finally:
            queue.done = position
        return True

    def _run(self, queue: Queue, kernel: Kernel, position: int) -> None:
        try:
            kernel.run()
        except Exception as error:  # told at the next host sync, as CUDA does
            words = " ".join(str(error).split())
            fault = DeviceFault(f"device-side fault in {kernel.name}, issued at {kernel.site}: {words}")
            fault.__cause__ = error
            queue.fail(fault, position)
            if not isinstance(kernel, Transfer):
                self.fault = fault

    # The host waits

    def host_sync(self, queue: Queue, at: int, clock: Clock, why: str) -> None:
        """A host thread waits for the first `at` items of a stream; counted by thread and place.  Tells faults."""
        self.count_sync(why)
        self.advance(queue, at)
        self.seen(clock)
        self.tell(queue, at)

    def wait_for(self, queue: Queue, why: str) -> None:
        """A host thread waits for all that a stream was given."""
        self.host_sync(queue, queue.issued, {**self.clock_of(queue), queue.number: queue.issued}, why)

    def seen(self, clock: Clock) -> None:
        """The host knows that all this is over, and so is whatever it issues from now on."""
        merge(self.host_clock, clock)
        self.host_version += 1

    def tell(self, queue: Queue, at: int) -> None:
        fault = self.fault or queue.failed_by(at)
        if fault is not None:
            raise DeviceFault(str(fault)) from fault.__cause__

    def count_sync(self, why: str) -> None:
        places = self.host_syncs.setdefault(threading.current_thread().name, {})
        place = f"{why} at {site()}"
        places[place] = places.get(place, 0) + 1


@contextmanager
def _plain_torch() -> Iterator[None]:
    """Items run on host tensors that nobody else sees: without autograd, autocast and inference mode of whoever waits.

    Any host thread may run what others queued, so all must compute alike.
    """
    compute_threads.join()
    with torch._C._AutoDispatchBelowAutograd(), torch._C._DisableAutocast():
        yield


MACHINE = Machine()
"""There is one simulated device in a process."""
