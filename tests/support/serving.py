"""An instance on loopback with a fake model, in threads of this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fake_relay import FakeModel
from nestpipe.config.serving import ServingConfig
from nestpipe.serve.http.app import App
from nestpipe.serve.http.recording import Recording
from nestpipe.serve.http.server import listen, server
from nestpipe.serve.http.tensors import encode
from nestpipe.serve.instance.instance import Instance

MODEL = "fake"


class FakeSource:
    """Checkpoints that a test adds; opening one may fail."""

    def __init__(self, make: Callable[[str], FakeModel] = FakeModel) -> None:
        self.versions, self.make = ["1"], make

    def newest(self) -> str | None:
        return self.versions[-1]

    def open(self) -> FakeModel:
        return self.make(self.versions[-1])


class Served:
    """What a test sees of it."""

    def __init__(self, app: App, instance: Instance, source: FakeSource, port: int) -> None:
        self.app, self.instance, self.source, self.port = app, instance, source, port
        self.url = f"http://127.0.0.1:{port}"

    def snapshot(self) -> dict[str, Any]:
        """Of a moment after everything before it."""
        seen: list[dict[str, Any]] = []
        done = threading.Event()

        def look(relay: Any) -> None:
            seen.append({"pins": relay.cache.pins, "holds": len(relay.holds), "counts": dict(relay.counts)})
            done.set()

        self.instance.compute.post(look)
        assert done.wait(20)
        return seen[0]

    def posted(self, calls: int) -> None:
        """Returns once so many calls wait for the compute thread, which a test holds."""
        for _ in range(4000):
            if self.instance.compute._calls.qsize() >= calls:
                return
            time.sleep(0.005)
        raise AssertionError("nothing was posted")

    def settled(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first snapshot for which that holds."""
        for _ in range(2000):
            if holds(now := self.snapshot()):
                return now
            time.sleep(0.005)
        raise AssertionError(f"it never came to that: {now}")


@contextlib.contextmanager
def serving(source: FakeSource | None = None, record: Path | None = None, **options: Any) -> Iterator[Served]:
    source = source or FakeSource()
    patient = {"deadline_ms": 120_000.0, "body_seconds": 120.0}  # a busy machine is not a wrong program
    config = ServingConfig(**{"arena": 64 * 64, "dram": 64 * 64, **patient, **options})
    instance = Instance(source, config)
    recording = Recording(record) if record is not None else None
    app = App(MODEL, control=True, identity="one")
    app.serve(instance, recording)
    sock = listen("127.0.0.1", 0, "--port")
    one = server(app, config)
    thread = threading.Thread(target=lambda: asyncio.run(one.serve([sock])), daemon=True)
    thread.start()
    try:
        yield Served(app, instance, source, sock.getsockname()[1])
    finally:
        one.should_exit = True
        thread.join(20)
        instance.stop()
        if recording is not None:
            recording.close()
        assert not thread.is_alive()


def inputs(history: Any, candidates: Any, now: int) -> dict[str, np.ndarray]:
    return {
        "history_items": history.items.astype("<i8"),
        "history_actions": history.actions.astype("<i4"),
        "history_times": history.times.astype("<i8"),
        "candidates": np.asarray(candidates, "<i8"),
        "now": np.array([now], "<i8"),
    }


def request_bytes(body: bytes, length: int | None, user: str = "u", **headers: str) -> bytes:
    """A request as it goes over the wire."""
    lines = [f"POST /v2/models/{MODEL}/infer HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", f"X-User: {user}"]
    if length is not None:
        lines.append(f"Inference-Header-Content-Length: {length}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def a_body(history: Any, candidates: Any, now: int = 99_999) -> tuple[bytes, int | None]:
    return encode({"parameters": {"binary_data_output": True}}, "inputs", inputs(history, candidates, now))


def raw(port: int, sent: bytes) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=20)
    sock.sendall(sent)
    return sock


def status_of(sock: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and JSON of the one answer that comes."""
    file = sock.makefile("rb")
    status = int(file.readline().split()[1])
    headers = {}
    while (line := file.readline().strip()) != b"":
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip()
    body = file.read(int(headers[b"content-length"]))
    return status, json.loads(body) if body.startswith(
        b"{"
    ) and b"inference-header-content-length" not in headers else {}
