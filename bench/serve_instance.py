"""What one instance costs and withstands, with a stand-in for the model: `python bench/serve_instance.py rpc cancel swaps`.

rpc        CPU and latency of the server around the model: 4 kB in, 1 kB out, 500 a second
cancel     how soon a cancelled pre-inference of 2,048 events stops
swaps      20 model swaps under load: errors, answers that mix versions, P99 beside that of before
overload   a minute of twice what the instance can do: answers in time beside the most that it can do
soak       `--minutes N` of returning users, swaps, cancels and clients that leave: memory, pins, errors
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from http_load import Answer, Connections, Load, poisson
from nestpipe.serve.http.tensors import encode

TICKS = os.sysconf("SC_CLK_TCK")


class Child:
    """A stand-in instance in a process of its own."""

    def __init__(self, port: int, process: subprocess.Popen[str]) -> None:
        self.port, self.process = port, process

    def cpu(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def rss_mb(self) -> float:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextmanager
def child(block_ms: float, open_ms: float, arena_mb: int = 400) -> Iterator[Child]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = str(Path(__file__).with_name("stand_in_relay.py"))
    arguments = [sys.executable, script, str(port), str(block_ms), str(open_ms), str(arena_mb)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield Child(port, process)
        process.send_signal(signal.SIGTERM)
        said = process.stdout.read()
        assert process.wait(30) == 0, process.returncode
        print(f"  at the end: {said.strip()}")
    finally:
        process.kill()
        process.wait()


def request(kind: str, user: str, events: int, candidates: int = 100, **headers: str) -> bytes:
    times = np.arange(events, dtype="<i8")
    tensors = {
        "history_items": times,
        "history_actions": np.zeros(events, "<i4"),
        "history_times": times,
        "candidates": np.arange(candidates, dtype="<i8"),
        "now": np.array([events], "<i8"),
    }
    if kind == "preinfer":
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("history")}
    body, length = encode({"parameters": {"binary_data_output": True}}, "inputs", tensors)
    lines = [f"POST /v2/models/stand-in/{kind} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", f"X-User: {user}"]
    lines += [f"Inference-Header-Content-Length: {length}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def plain(method: str, path: str, **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", "Content-Length: 0"]
    return ("\r\n".join(lines + [f"{n.replace('_', '-')}: {v}" for n, v in headers.items()]) + "\r\n\r\n").encode()


CANCEL, LOAD = "/v2/models/stand-in/preinfer", plain("POST", "/v2/repository/models/stand-in/load")


async def counts(http: Connections) -> dict[str, Any]:
    await asyncio.sleep(0.7)  # the instance's snapshot is at most half a second old when it idles
    found: dict[str, Any] = json.loads((await http.send(plain("GET", "/debug/page"))).body)["now"]
    return found


async def rpc(seconds: float) -> dict[str, Any]:
    with child(0.0, 0.0) as one:
        http = Connections(one.port)
        requests = [request("infer", f"u{i}", 150) for i in range(50)]
        for warm in requests * 4:
            answer = await http.send(warm)
        before = one.cpu()
        load = await poisson(500, seconds, lambda i: http.send(requests[i % 50]))
        cpu = one.cpu() - before
        http.close()
    total = sum(load.statuses.values())
    return {
        "bytes_in": len(requests[0]),
        "bytes_out": len(answer.body) + sum(len(k) + len(v) + 4 for k, v in answer.headers.items()),
        "requests": total,
        "statuses": load.statuses,
        "errors": load.errors,
        "cpu_ms_a_request": round(1e3 * cpu / total, 4),
        "p50_ms": load.ms(50),
        "p99_ms": load.ms(99),
    }


async def cancel(rounds: int = 20) -> dict[str, Any]:
    took = []
    with child(10.0, 5.0) as one:
        http = Connections(one.port)
        after = 0
        for i in range(rounds):
            await http.send(request("preinfer", f"c{i}", 2048))
            await asyncio.sleep(0.03 + 0.001 * (i % 10))
            begun = time.perf_counter()
            answer = await http.send(plain("DELETE", CANCEL, X_User=f"c{i}"))
            took.append(1e3 * (time.perf_counter() - begun))
            assert json.loads(answer.body)["cancelled"]
            done = (await counts(http))["counts"]["blocks"]
            await asyncio.sleep(0.1)
            after += (await counts(http))["counts"]["blocks"] - done
        http.close()
    return {
        "chunk_ms": 10.0,
        "cancel_ms_median": float(np.median(took)),
        "cancel_ms_most": max(took),
        "blocks_after": after,
    }


class Pairs:
    """A pre-inference, then its ranking 100 ms later; each answer is checked to be of one version."""

    def __init__(self, http: Connections, users: int, events: int) -> None:
        self._http, self._users, self._events = http, users, events
        self.mixed, self.versions = 0, set[str]()

    async def __call__(self, number: int) -> Answer:
        user = f"p{number % self._users}"
        answer = await self._http.send(request("infer", user, self._events, X_Deadline_Ms="1000"))
        if answer.status == 200:
            length = int(answer.headers[b"inference-header-content-length"])
            version = json.loads(answer.body[:length])["model_version"]
            self.versions.add(version)
            scores = np.frombuffer(answer.body[length:], np.float32)
            self.mixed += not (scores == int(version)).all()
        return answer

    async def ahead(self, number: int) -> Answer:
        return await self._http.send(request("preinfer", f"p{number % self._users}", self._events, X_Due_Ms="100"))


async def _paired(pairs: Pairs, rate: float, seconds: float, seed: int) -> Load:
    """Rankings at Poisson times, each pre-inferred 100 ms before."""
    ahead = asyncio.ensure_future(poisson(rate, seconds, pairs.ahead, seed=seed))
    await asyncio.sleep(0.1)
    load = await poisson(rate, seconds, pairs, seed=seed)
    await ahead
    return load


async def swaps(count: int = 20, rate: float = 12.0) -> dict[str, Any]:
    """20 users of 769 events: 12 blocks of 2 ms and 10 ms of ranking, half of what one core can do if all miss."""
    with child(2.0, 10.0) as one:
        http = Connections(one.port)
        pairs = Pairs(http, 200, 769)
        await _paired(pairs, rate, 5, seed=9)
        before = await _paired(pairs, rate, 2.0 * count, seed=1)

        async def swap() -> list[int]:
            statuses = []
            for _ in range(count):
                statuses.append((await http.send(LOAD)).status)
                await asyncio.sleep(1.0)
            return statuses

        swapping = asyncio.ensure_future(swap())
        during = await _paired(pairs, rate, 2.0 * count, seed=2)
        loaded = await swapping
        left = await counts(http)
        http.close()
    return {
        "swaps": loaded.count(200),
        "versions_seen": len(pairs.versions),
        "mixed": pairs.mixed,
        "errors": before.errors + during.errors,
        "statuses": {"before": before.statuses, "during": during.statuses},
        "p99_ms_before": before.ms(99),
        "p99_ms_during": during.ms(99),
        "ratio": during.ms(99) / before.ms(99),
        "versions_in_memory": left["versions"],
    }


async def overload(seconds: float, deadline_ms: float = 200.0) -> dict[str, Any]:
    """Full inference of 513 events, a user each: 8 blocks of 2 ms and 5 ms of ranking."""
    with child(2.0, 5.0) as one:
        http = Connections(one.port)

        async def some(number: int) -> Answer:
            return await http.send(request("infer", f"o{number}", 513, X_Deadline_Ms=str(deadline_ms)))

        async def closed(until: float, start: int) -> int:
            done = 0
            while time.perf_counter() < until:
                done += (await some(start + done)).status == 200
            return done

        most = 0.0
        for _ in range(2):
            until = time.perf_counter() + 10
            most = max(most, sum(await asyncio.gather(*(closed(until, 10**6 * k) for k in range(3)))) / 10)
        load = await poisson(2 * most, seconds, some, limit_ms=deadline_ms, seed=3)
        seen = await counts(http)
        http.close()
    return {
        "most_a_second": most,
        "offered_a_second": 2 * most,
        "statuses": load.statuses,
        "errors": load.errors,
        "in_time_a_second": load.in_time / seconds,
        "goodput": load.in_time / seconds / most,
        "started_late": seen["counts"].get("started_late", 0),
    }


async def soak(minutes: float) -> dict[str, Any]:
    samples = []
    with child(2.0, 5.0, arena_mb=60) as one:
        http = Connections(one.port)
        pairs = Pairs(http, 300, 769)
        until, swapped, left = time.perf_counter() + 60 * minutes, 0, 0
        statuses: dict[int, int] = {}
        errors = 0
        while time.perf_counter() < until:
            load = asyncio.ensure_future(_paired(pairs, 12, 20, seed=int(time.time())))
            for i in range(10):
                await asyncio.sleep(1.5)
                await http.send(request("preinfer", f"c{i}", 769))
                await http.send(plain("DELETE", CANCEL, X_User=f"c{i}"))
                with suppress(asyncio.TimeoutError):  # a client that leaves in mid-ranking
                    await asyncio.wait_for(Connections(one.port).send(request("infer", f"l{i}{left}", 1500)), 0.02)
                left += 1
            swapped += (await http.send(LOAD)).status == 200
            found = await load
            errors += found.errors
            for status, number in found.statuses.items():
                statuses[status] = statuses.get(status, 0) + number
            now = await counts(http)
            fill = now["arena_bytes"] / max(1, now["arena_limit"])
            samples.append((round(one.rss_mb(), 1), round(fill, 3), now["pins"] - now["holds"]))
            print(
                f"  {len(samples)}: RSS {samples[-1][0]} MB, arena {fill:.0%}, pins beside holds {samples[-1][2]}",
                flush=True,
            )
        await asyncio.sleep(4)  # holds end
        last = await counts(http)
        http.close()
    half = len(samples) // 2
    return {
        "minutes": minutes,
        "statuses": statuses,
        "errors": errors,
        "mixed": pairs.mixed,
        "swaps": swapped,
        "clients_left": left,
        "pins_at_the_end": last["pins"],
        "arena_fill_most": max(fill for _, fill, _ in samples),
        "rss_mb": {"after_first_round": samples[0][0], "half_time": samples[half][0], "end": samples[-1][0]},
        "step_errors": last["counts"].get("errors", 0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=["rpc", "cancel", "swaps", "overload", "soak"])
    parser.add_argument("--seconds", type=float, default=20, help="of rpc; overload always takes 60")
    parser.add_argument("--minutes", type=float, default=30, help="of soak")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    runs: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
        "rpc": lambda: rpc(args.seconds),
        "cancel": cancel,
        "swaps": swaps,
        "overload": lambda: overload(60),
        "soak": lambda: soak(args.minutes),
    }
    found = {}
    for what in args.what:
        print(what, flush=True)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            found[what] = runner.run(_as_coroutine(runs[what]))
        for name, value in found[what].items():
            print(f"  {name}: {round(value, 3) if isinstance(value, float) else value}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")


async def _as_coroutine(run: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    return await run()


if __name__ == "__main__":
    main()
