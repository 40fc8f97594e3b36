"""Streams and events, spelled as in torch.cuda.  Safe from any thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nestpipe.device.sim.machine import MACHINE, Clock, Queue, Wait, merge

_DEVICE_TYPE = 20  # c10::DeviceType::PrivateUse1


class Stream(torch.Stream):
    """A queue of work.  Items of one stream run in order; streams are ordered by events only."""

    def __new__(cls, device: object = None, priority: int = 0, *, stream_id: int | None = None, **_: object) -> Stream:
        if stream_id is None:
            with MACHINE.lock:
                stream_id = MACHINE.new_stream()
        return super().__new__(cls, stream_id=stream_id, device_index=0, device_type=_DEVICE_TYPE)

    @property
    def queue(self) -> Queue:
        """Callers hold the machine's lock."""
        return MACHINE.queue(self.stream_id)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        with MACHINE.lock:
            MACHINE.wait_for(self.queue, "Stream.synchronize")

    def query(self) -> bool:
        """Whether all is over that this stream was given."""
        return self.record_event().query()

    def __enter__(self) -> Stream:
        self.__dict__.setdefault("_before", []).append(MACHINE.thread.stream)
        MACHINE.thread.stream = self.stream_id
        return self

    def __exit__(self, *_: object) -> None:
        MACHINE.thread.stream = self.__dict__["_before"].pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, torch.Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(("sim stream", self.stream_id))

    def __repr__(self) -> str:
        return f"<sim stream {self.stream_id}>"


class Event:
    """A point in a stream.  Before it is recorded it counts as passed."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._queue: Queue | None = None
        self._at = 0
        self._clock: Clock = {}
        self._epoch = 0

    def record(self, stream: Stream | None = None) -> None:
        with MACHINE.lock:
            queue = MACHINE.current() if stream is None else MACHINE.queue(stream.stream_id)
            self._queue, self._at, self._epoch = queue, queue.issued, MACHINE.epoch
            self._clock = {**MACHINE.clock_of(queue), queue.number: queue.issued}

    def wait(self, stream: Stream | None = None) -> None:
        """What `stream` is given from now on runs after this event."""
        with MACHINE.lock:
            if self._queue is None or self._epoch != MACHINE.epoch:
                return
            queue = MACHINE.current() if stream is None else MACHINE.queue(stream.stream_id)
            if queue is not self._queue:
                merge(queue.clock, self._clock)
                MACHINE.put(queue, Wait(self._queue, self._at))

    def query(self) -> bool:
        with MACHINE.lock:
            if self._queue is None:
                return True
            over = MACHINE.poll(self._queue, self._at)
            if over and self._epoch == MACHINE.epoch:
                MACHINE.seen(self._clock)
            return over

    def synchronize(self) -> None:
        with MACHINE.lock:
            if self._queue is not None and self._epoch == MACHINE.epoch:
                MACHINE.host_sync(self._queue, self._at, self._clock, "Event.synchronize")

    def elapsed_time(self, end: Event) -> float:
        raise RuntimeError("the simulated device has no clock: measure elapsed times on hardware")


def current_stream(device: object = None) -> Stream:
    """The stream that this thread issues to."""
    return Stream(stream_id=MACHINE.thread.stream)


def default_stream(device: object = None) -> Stream:
    return Stream(stream_id=0)


def set_stream(stream: Stream) -> None:
    MACHINE.thread.stream = stream.stream_id


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """This thread issues to `stream` inside."""
    before = MACHINE.thread.stream
    if stream is not None:
        MACHINE.thread.stream = stream.stream_id
    try:
        yield
    finally:
        MACHINE.thread.stream = before


def synchronize(device: object = None) -> None:
    """The host waits for all streams."""
    with MACHINE.lock:
        MACHINE.count_sync("synchronize")
        points = [(queue, queue.issued) for queue in MACHINE.queues.values()]
        for queue, at in points:
            MACHINE.advance(queue, at)
        MACHINE.seen({queue.number: at for queue, at in points})
        for queue, at in points:
            MACHINE.tell(queue, at)
