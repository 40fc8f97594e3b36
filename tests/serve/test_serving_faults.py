"""Bad input and faults: each has one clear answer, the instance goes on, and no pin is left."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from browsing import in_a_loop_of_its_own
from fake_relay import FakeModel, a_history, full_scores
from nestpipe.serve import AsyncClient, Client
from nestpipe.serve.client import ServingError
from nestpipe.serve.http.tensors import encode
from serving import MODEL, FakeSource, Served, a_body, inputs, raw, request_bytes, serving, status_of

NOW = 99_999


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(max_body=2_000_000, max_candidates=100_000) as one:
        yield one


@pytest.fixture(autouse=True)
def goes_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each fault on the common instance: it ranks, and nothing is pinned."""
    yield
    if "served" in request.fixturenames:
        served: Served = request.getfixturevalue("served")
        with Client(served.url, MODEL) as client:
            ranked = client.rank("fine", a_history(20), np.arange(5), NOW)
            assert ranked.scores.tobytes() == full_scores(FakeModel(), a_history(20), NOW, np.arange(5)).tobytes()
        served.settled(lambda now: now["pins"] == 0)


def refused(served: Served, tensors: dict[str, np.ndarray], head: dict[str, Any] | None = None, **headers: str) -> str:
    """The one line of a 400."""
    body, length = encode(head or {}, "inputs", tensors)
    status, said = status_of(raw(served.port, request_bytes(body, length, **headers)))
    assert status == 400 and "\n" not in said["error"]
    return str(said["error"])


def good() -> dict[str, np.ndarray]:
    return inputs(a_history(20), np.arange(5), NOW)


def test_unknown_users_and_items_are_ranked(served: Served) -> None:
    """Promise: whoever was never seen gets full inference; items without a row have their initial value."""
    with Client(served.url, MODEL) as client:
        ranked = client.rank("never seen", a_history(20, 77), np.array([10**15, -3]), NOW)
    assert ranked.path == "miss" and np.isfinite(ranked.scores).all()


def test_histories_of_any_length(served: Served) -> None:
    """Promise: an empty history and one far longer than the window are ranked as full inference would."""
    with Client(served.url, MODEL) as client:
        for events in (0, 1, 4, 5, 31, 32, 33, 4000):
            ranked = client.rank(f"len{events}", a_history(events), np.arange(6), NOW)
            assert ranked.scores.tobytes() == full_scores(FakeModel(), a_history(events), NOW, np.arange(6)).tobytes()


def test_no_and_very_many_candidates(served: Served) -> None:
    """Promise: none gives no scores; 100,000 are scored; above the limit is a line with the limit."""
    with Client(served.url, MODEL) as client:
        assert client.rank("a", a_history(20), np.arange(0), NOW).scores.shape == (0, 2)
        many = client.rank("a", a_history(20), np.arange(100_000), NOW, deadline_ms=60_000)
        assert many.scores.tobytes() == full_scores(FakeModel(), a_history(20), NOW, np.arange(100_000)).tobytes()
    assert "at most 100000" in refused(served, {**good(), "candidates": np.arange(100_001)})


def test_wrong_inputs_are_one_line_that_names_the_input(served: Served) -> None:
    """Promise: dtype, shape, length, order, range and names are checked, and the answer says which input."""
    wrong: list[tuple[str, dict[str, np.ndarray]]] = [
        ("candidates", {"candidates": np.arange(5, dtype=np.int32)}),
        ("candidates", {"candidates": np.arange(6).reshape(2, 3)}),
        ("history_items", {"history_items": np.arange(20, dtype=np.float32)}),
        ("one length", {"history_items": np.arange(19)}),
        ("ascend", {"history_times": np.arange(20)[::-1].copy()}),
        ("history_actions", {"history_actions": np.full(20, 4, np.int32)}),
        ("history_actions", {"history_actions": np.full(20, -1, np.int32)}),
        ("before the last", {"now": np.array([-1])}),
        ("one number", {"now": np.array([1, 2])}),
        ("history_start", {"history_start": np.array([-1])}),
        ("unknown input 'nonsense'", {"nonsense": np.arange(3)}),
    ]
    for says, tensors in wrong:
        assert says in refused(served, {**good(), **tensors})
    for name in good():
        assert f"'{name}' is missing" in refused(served, {key: value for key, value in good().items() if key != name})
    assert "only output" in refused(served, good(), {"outputs": [{"name": "probabilities"}]})
    assert "X-Deadline-Ms" in refused(served, good(), X_Deadline_Ms="soon")
    assert "X-Deadline-Ms" in refused(served, good(), X_Deadline_Ms="nan")
    assert "user" in refused(served, good(), user="u" * 600)
    assert "Content-Encoding gzip" in refused(served, good(), Content_Encoding="gzip")


@pytest.mark.parametrize(
    "change",
    [
        lambda head: head["inputs"][0].update(datatype="BYTES"),
        lambda head: head["inputs"][0].update(shape=[-1]),
        lambda head: head["inputs"][0].update(shape=[2**39, 2**39]),
        lambda head: head["inputs"][0].update(shape="x"),
        lambda head: head["inputs"][0]["parameters"].update(binary_data_size=7),
        lambda head: head["inputs"][0].update(parameters={"binary_data_size": -8}),
        lambda head: head["inputs"][0].pop("name"),
        lambda head: head["inputs"][0].pop("parameters"),
        lambda head: head.update(inputs={}),
        lambda head: head.update(inputs=[1]),
        lambda head: head.update(outputs=[1]),
    ],
)
def test_bodies_that_do_not_add_up(served: Served, change: Callable[[Any], Any]) -> None:
    """Promise: whatever the JSON says about shapes and sizes, the answer is a line, not a crash."""
    body, length = encode({}, "inputs", good())
    head = json.loads(body[:length])
    change(head)
    text = json.dumps(head).encode()
    status, said = status_of(raw(served.port, request_bytes(text + body[length:], len(text))))
    assert status == 400 and said["error"]


def test_truncated_bodies(served: Served) -> None:
    """Promise: a body that was cut anywhere is a 400, binary or JSON; cut off by the network, nobody waits for the rest."""
    body, length = encode({}, "inputs", good())
    assert length is not None
    for cut in (0, 1, length // 2, length, length + 1, len(body) - 1):
        status, _ = status_of(raw(served.port, request_bytes(body[:cut], min(length, cut))))
        assert status == 400
    for bad in (len(body) + 1, -1):
        assert status_of(raw(served.port, request_bytes(body, bad)))[0] == 400
    assert status_of(raw(served.port, request_bytes(b"[" * 100_000, None)))[0] == 400
    raw(served.port, request_bytes(body, length)[:-10]).close()


def test_a_body_above_the_limit(served: Served) -> None:
    """Promise: 413, before it is read if its length is told, and after the limit if not."""
    head = f"POST /v2/models/{MODEL}/infer HTTP/1.1\r\nHost: x\r\n".encode()
    status, said = status_of(raw(served.port, head + b"Content-Length: 99999999\r\n\r\n"))
    assert status == 413 and "2000000" in said["error"]
    sock = raw(served.port, head + b"Transfer-Encoding: chunked\r\n\r\n")
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    with pytest.raises(OSError):  # it hangs up while we still send
        for _ in range(2000):
            sock.sendall(chunk)


def test_a_byte_a_second() -> None:
    """Promise: a body that trickles in is a 408, a head that does is hung up on, and others are served before and after."""
    sent = request_bytes(*a_body(a_history(20), np.arange(5)))
    body_start = sent.index(b"\r\n\r\n") + 4
    with serving(body_seconds=1.0) as one, Client(one.url, MODEL) as client:
        slow_body, slow_head = raw(one.port, sent[: body_start + 3]), raw(one.port, sent[:20])
        client.rank("quick", a_history(20), np.arange(5), NOW)
        status, said = status_of(slow_body)
        assert status == 408 and "1 s" in said["error"]
        assert slow_head.recv(1) == b""
        client.rank("quick", a_history(20), np.arange(5), NOW)
        assert one.snapshot()["pins"] == 0


def test_a_deadline_in_the_past(served: Served) -> None:
    """Promise: 504 at once, and nothing is computed."""
    before = served.snapshot()["counts"].get("blocks", 0)
    with Client(served.url, MODEL) as client, pytest.raises(ServingError, match="deadline") as error:
        client.rank("late", a_history(30, 5), np.arange(5), NOW, deadline_ms=-1)
    assert error.value.status == 504 and served.snapshot()["counts"].get("blocks", 0) == before


class Gate:
    """A model that stands still in a step until it is let go."""

    def __init__(self, kind: str, at: int) -> None:
        self.kind, self.at = kind, at
        self.reached, self.go, self.closed = threading.Event(), threading.Event(), False
        self.calls: list[tuple[str, int]] = []

    def model(self, version: str) -> FakeModel:
        return FakeModel(version, called=self.called)

    def called(self, kind: str, size: int) -> None:
        self.calls.append((kind, size))
        if self.closed and (kind, size) == (self.kind, self.at):
            self.reached.set()
            assert self.go.wait(20)


def test_a_client_that_leaves_stops_its_compute() -> None:
    """Promise: after a client has left, no further block of its ranking is computed, and its pin goes."""
    gate = Gate("block", 2)
    with serving(FakeSource(gate.model)) as one:
        gate.calls.clear()
        gate.closed = True
        for reset in (False, True):
            gate.reached.clear(), gate.go.clear(), gate.calls.clear()
            sock = raw(one.port, request_bytes(*a_body(a_history(30, reset), np.arange(5)), user=f"l{reset}"))
            assert gate.reached.wait(20)
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
            one.posted(1)  # its end has been noticed, and waits for the step to end
            gate.go.set()
            one.settled(lambda now: now["pins"] == 0)
            assert gate.calls == [("block", 0), ("block", 1), ("block", 2)]
        assert one.snapshot()["counts"]["cancelled"] == 2

        async def given_up() -> None:
            async with AsyncClient(one.url, MODEL) as client:
                ranking = asyncio.ensure_future(client.rank("g", a_history(30, 9), np.arange(5), NOW))
                await asyncio.to_thread(gate.reached.wait, 20)
                ranking.cancel()
                await asyncio.to_thread(one.posted, 1)

        gate.reached.clear(), gate.go.clear()
        in_a_loop_of_its_own(given_up())
        gate.go.set()
        one.settled(lambda now: now["counts"]["cancelled"] == 3 and now["pins"] == 0)


def test_a_full_queue_is_a_429_and_what_expires_in_it_a_504() -> None:
    """Promise: beyond the queue: 429 with Retry-After; what waits too long never starts."""
    gate = Gate("block", 0)
    with serving(FakeSource(gate.model), queue=2) as one:
        gate.closed = True
        first = raw(one.port, request_bytes(*a_body(a_history(30, 0), [1]), user="a"))
        assert gate.reached.wait(20)
        gate.calls.clear()
        waiting = [
            raw(one.port, request_bytes(*a_body(a_history(3, i), [1]), user=f"w{i}", X_Deadline_Ms="50"))
            for i in (1, 2, 3)
        ]
        one.posted(3)
        time.sleep(0.06)  # their deadline passes while the first one computes
        gate.closed = False
        gate.go.set()
        assert status_of(first)[0] == 200
        found = [status_of(sock)[0] for sock in waiting]
        assert set(found) <= {504, 429} and ("open", 3) not in gate.calls
        one.settled(lambda now: now["pins"] == 0)
    gate = Gate("open", 3)
    with serving(FakeSource(gate.model), queue=1) as one:
        gate.closed = True
        blocks = raw(one.port, request_bytes(*a_body(a_history(3, 0), [1]), user="a"))
        assert gate.reached.wait(20)
        both = [raw(one.port, request_bytes(*a_body(a_history(3, i), [1]), user=f"{i}")) for i in (1, 2)]
        one.posted(2)
        gate.closed = False
        gate.go.set()
        assert status_of(blocks)[0] == 200
        answers = [httpx_like(sock) for sock in both]
        assert sorted(status for status, _ in answers) == [200, 429]
        assert all(int(headers["retry-after"]) >= 1 for status, headers in answers if status == 429)


def httpx_like(sock: socket.socket) -> tuple[int, dict[str, str]]:
    head = sock.makefile("rb")
    status = int(head.readline().split()[1])
    lines = iter(lambda: head.readline().strip().decode(), "")
    return status, {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


@pytest.mark.parametrize("slots", [0, 1, 3])
def test_an_arena_smaller_than_a_prefix(slots: int) -> None:
    """Promise: rankings are full inference then, with the same bits; pre-inference is refused with a reason."""
    with serving(arena=slots * 64, dram=0) as one, Client(one.url, MODEL) as client:
        assert client.preinfer("a", a_history(32))["reason"] == "arena full"
        for _ in range(2):
            ranked = client.rank("a", a_history(32), np.arange(5), NOW)
            assert ranked.scores.tobytes() == full_scores(FakeModel(), a_history(32), NOW, np.arange(5)).tobytes()
        one.settled(lambda now: now["pins"] == 0)


def test_a_disk_that_cannot_be_read() -> None:
    """Promise: a read error of the tables is a 500 for the requests that meet it, and for no others."""
    broken = [False]

    def called(kind: str, size: int) -> None:
        if broken[0] and kind == "block" and size == 1:
            raise OSError(5, "Input/output error", "rows-0.bin")

    with serving(FakeSource(lambda version: FakeModel(version, called=called))) as one:
        with Client(one.url, MODEL) as client:
            broken[0] = True
            client.preinfer("p", a_history(30, 1))
            for user in ("a", "p"):
                with pytest.raises(ServingError, match="Input/output error") as error:
                    client.rank(user, a_history(30), np.arange(4), NOW)
                assert error.value.status == 500
            assert client.rank("short", a_history(3), np.arange(4), NOW).scores.shape == (4, 2)
            broken[0] = False
            ranked = client.rank("a", a_history(30), np.arange(4), NOW)
            assert ranked.scores.tobytes() == full_scores(FakeModel(), a_history(30), NOW, np.arange(4)).tobytes()
        one.settled(lambda now: now["pins"] == 0)


def test_nan_in_a_row() -> None:
    """Promise: a candidate whose row is NaN spoils its own score and is counted; a history that does is a 500."""

    def make(version: str) -> FakeModel:
        model = FakeModel(version)
        model.bad_items = {13_000}
        return model

    with serving(FakeSource(make)) as one, httpx.Client(base_url=one.url) as http:
        body, length = a_body(a_history(20), np.array([1, 13_000, 2]))
        sent = {"headers": {"Inference-Header-Content-Length": str(length), "X-User": "n"}, "content": body}
        answer = http.post(f"/v2/models/{MODEL}/infer", **sent)
        scores = np.frombuffer(answer.content[-24:], np.float32).reshape(3, 2)
        assert answer.status_code == 200 and answer.headers["x-nonfinite"] == "1"
        assert np.isnan(scores[1]).all() and np.isfinite(scores[[0, 2]]).all()
        text, _ = encode({}, "inputs", inputs(a_history(20), [1, 13_000], NOW), binary=False)
        answer = http.post(f"/v2/models/{MODEL}/infer", content=text)
        assert answer.json()["outputs"][0]["data"][2:] == [None, None]
        history = a_history(20)
        history.items[4] = 13_000
        with Client(one.url, MODEL) as client, pytest.raises(ServingError, match="NaN") as error:
            client.rank("bad", history, np.arange(3), NOW)
        assert error.value.status == 500
        assert "nestpipe_nonfinite_scores_total 5.0" in http.get("/metrics").text


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (FileNotFoundError(2, "No such file or directory", "step-2/rows-0"), "No such file"),
        (ValueError("step-2/rows-0 is damaged: its digest differs"), "damaged"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded(error: Exception, says: str) -> None:
    """Promise: deleted while it is loaded, or damaged: the old version stays, and the answer and the page say why."""

    def make(version: str) -> FakeModel:
        if version == "2":
            raise error
        return FakeModel(version)

    with serving(FakeSource(make)) as one:
        one.source.versions.append("2")
        answer = httpx.post(f"{one.url}/v2/repository/models/{MODEL}/load", timeout=20)
        assert (
            answer.status_code == 409 and says in answer.json()["error"] and "version 1 still" in answer.json()["error"]
        )
        assert says in httpx.get(f"{one.url}/debug/page").json()["trouble"]
        with Client(one.url, MODEL) as client:
            assert client.rank("a", a_history(9), np.arange(2), NOW).version == "1"
        one.source.versions.append("3")
        assert httpx.post(f"{one.url}/v2/repository/models/{MODEL}/load", timeout=20).json() == {"version": "3"}
        assert httpx.get(f"{one.url}/debug/page").json()["trouble"] == ""


def test_a_newer_model_of_another_shape_or_without_scores_does_not_serve() -> None:
    """Promise: a checkpoint whose blocks differ, or whose weights are NaN, leaves the old version serving."""

    def make(version: str) -> FakeModel:
        model = FakeModel(version, block_floats=16 if version == "2" else 12)
        model.bad_items = set(range(256)) if version == "3" else set()
        return model

    with serving(FakeSource(make)) as one:
        for version, says in (("2", "another block_floats"), ("3", "no finite score")):
            one.source.versions.append(version)
            answer = httpx.post(f"{one.url}/v2/repository/models/{MODEL}/load", timeout=20)
            assert answer.status_code == 409 and says in answer.json()["error"]
        assert one.instance.version == "1"
