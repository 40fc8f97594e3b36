"""An open-loop load generator: Poisson arrivals, latencies from the intended arrival, one connection a request in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np
from hdrh.histogram import HdrHistogram


@dataclass
class Answer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes


@dataclass
class Load:
    """What a load found.  Latencies in microseconds, of answers with status 200."""

    latency: HdrHistogram = field(default_factory=lambda: HdrHistogram(1, 120_000_000, 3))
    statuses: dict[int, int] = field(default_factory=dict)
    errors: int = 0
    in_time: int = 0
    seconds: float = 0.0

    def ms(self, percentile: float) -> float:
        return float(self.latency.get_value_at_percentile(percentile)) / 1e3


class Connections:
    """Keep-alive connections to one server."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, request: bytes) -> Answer:
        while self._free and (self._free[-1][1].is_closing() or self._free[-1][0].at_eof()):
            self._free.pop()
        reader, writer = self._free.pop() if self._free else await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            first, *lines = head[:-4].split(b"\r\n")
            headers = dict(line.lower().split(b": ", 1) for line in lines)
            body = await reader.readexactly(int(headers.get(b"content-length", b"0")))
        except BaseException:
            writer.close()
            raise
        if headers.get(b"connection") == b"close":
            writer.close()
        else:
            self._free.append((reader, writer))
        return Answer(int(first.split()[1]), headers, body)

    def close(self) -> None:
        for _, writer in self._free:
            writer.close()


async def poisson(
    rate: float, seconds: float, one: Callable[[int], Awaitable[Answer]], limit_ms: float = 1e9, seed: int = 0
) -> Load:
    """Calls `one` at Poisson times, whatever has been answered until then."""
    load, draw = Load(), np.random.default_rng(seed)
    begun = at = time.perf_counter()
    tasks: set[asyncio.Task[None]] = set()

    async def go(number: int, intended: float) -> None:
        try:
            answer = await one(number)
        except (OSError, asyncio.IncompleteReadError):
            load.errors += 1
            return
        took = time.perf_counter() - intended
        load.statuses[answer.status] = load.statuses.get(answer.status, 0) + 1
        if answer.status == 200:
            load.latency.record_value(max(1, int(took * 1e6)))
            load.in_time += took * 1e3 <= limit_ms

    number = 0
    while at - begun < seconds:
        at += draw.exponential(1 / rate)
        wait = at - time.perf_counter()
        if wait > 0:
            await asyncio.sleep(wait)
        task = asyncio.ensure_future(go(number, at))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        number += 1
    await asyncio.gather(*tasks)
    load.seconds = time.perf_counter() - begun
    return load
