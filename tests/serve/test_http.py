"""An instance over HTTP: the protocol, both clients, tritonclient, health, metrics, versions."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from browsing import in_a_loop_of_its_own
from fake_relay import FakeModel, a_history, full_scores
from nestpipe.serve import AsyncClient, Client
from nestpipe.serve.client import ServingError
from nestpipe.serve.http.recording import read_recording
from serving import MODEL, FakeSource, Served, inputs, serving

NOW = 99_999


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as one:
        yield one


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.url, MODEL) as one:
        yield one


def expected(events: int, seed: int, candidates: Any, version: str = "1") -> bytes:
    return full_scores(FakeModel(version), a_history(events, seed), NOW, np.asarray(candidates)).tobytes()


def test_scores_over_http_have_the_bits_of_full_inference(client: Client) -> None:
    """Promise: miss, hit, takeover and pre-inferred rankings answer with full inference's bits."""
    candidates = np.arange(50, 300)
    for events, path in ((20, "miss"), (20, "hit"), (32, "takeover")):
        ranked = client.rank("bits", a_history(events, 7), candidates, NOW)
        assert (ranked.path, ranked.version, ranked.instance) == (path, "1", "one")
        assert ranked.scores.tobytes() == expected(events, 7, candidates)
    told = client.preinfer("ahead", a_history(31, 8), due_ms=50)
    assert told["admitted"] and told["instance"] == "one"
    ranked = client.rank("ahead", a_history(31, 8), candidates, NOW)
    assert ranked.path in ("hit", "takeover", "miss")  # by how far it had come
    assert ranked.scores.tobytes() == expected(31, 8, candidates)


def test_windows_move_with_the_whole_history(client: Client) -> None:
    """Promise: a client may send only the end of a history, with `history_start`, and gets the same scores."""
    whole = client.rank("w1", a_history(200, 3), np.arange(9), NOW)
    end = client.rank("w2", a_history(200, 3, start=150), np.arange(9), NOW)
    assert whole.scores.tobytes() == end.scores.tobytes() == expected(200, 3, np.arange(9))


def test_json_requests(served: Served) -> None:
    """Promise: the protocol without the binary extension gives the same numbers, and the id comes back."""
    tensors = inputs(a_history(20, 1), np.arange(4), NOW)
    names = {"<i8": "INT64", "<i4": "INT32"}
    listed = [
        {"name": name, "shape": list(t.shape), "datatype": names[t.dtype.str], "data": t.tolist()}
        for name, t in tensors.items()
    ]
    body = {"id": "seven", "inputs": listed, "parameters": {"user": "json"}}
    answer = httpx.post(f"{served.url}/v2/models/{MODEL}/infer", json=body)
    found = answer.json()
    assert answer.status_code == 200 and found["id"] == "seven" and found["model_version"] == "1"
    output = found["outputs"][0]
    assert output["name"] == "scores" and output["shape"] == [4, 2] and output["datatype"] == "FP32"
    assert np.array(output["data"], np.float32).tobytes() == expected(20, 1, np.arange(4))
    again = httpx.post(f"{served.url}/v2/models/{MODEL}/infer", json=body)
    assert again.headers["x-relay"] == "hit"  # the parameter `user` is as good as X-User


def test_tritonclient_works_unchanged(served: Served) -> None:
    """Promise: tritonclient's health, metadata, inference (binary and not) and load need nothing of ours."""
    triton = pytest.importorskip("tritonclient.http")
    client = triton.InferenceServerClient(served.url.removeprefix("http://"))
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(MODEL)
    assert client.get_server_metadata()["name"] == "nestpipe"
    assert {one["name"] for one in client.get_model_metadata(MODEL)["inputs"]} >= {"history_items", "candidates", "now"}
    for binary in (True, False):
        sent = []
        for name, tensor in inputs(a_history(25, 2), np.arange(30), NOW).items():
            entry = triton.InferInput(name, list(tensor.shape), "INT32" if tensor.dtype.itemsize == 4 else "INT64")
            entry.set_data_from_numpy(tensor, binary_data=binary)
            sent.append(entry)
        wanted = [triton.InferRequestedOutput("scores", binary_data=binary)]
        for outputs in (wanted, None):
            result = client.infer(MODEL, sent, outputs=outputs, headers={"X-User": "t"}, request_id="9")
            assert result.as_numpy("scores").tobytes() == expected(25, 2, np.arange(30))
    client.load_model(MODEL)
    assert client.get_model_repository_index()[0]["state"] == "READY"
    client.close()


def test_the_async_client(served: Served) -> None:
    """Promise: many rankings at once over one client, each with its own scores."""

    async def many() -> list[bytes]:
        async with AsyncClient(served.url, MODEL) as client:
            await client.preinfer("as3", a_history(30, 3))
            assert await client.cancel("as3")
            ranked = await asyncio.gather(
                *(client.rank(f"as{i}", a_history(10 + i, i), np.arange(20), NOW) for i in range(20))
            )
            return [one.scores.tobytes() for one in ranked]

    assert in_a_loop_of_its_own(many()) == [expected(10 + i, i, np.arange(20)) for i in range(20)]


def test_traces_are_continued(served: Served, client: Client) -> None:
    """Promise: the trace id of a request comes back with a span of ours; a bad or missing one is replaced."""
    body = {"inputs": []}
    given = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    url = f"{served.url}/v2/models/{MODEL}/infer"
    back = httpx.post(url, json=body, headers={"traceparent": given}).headers["traceparent"]
    assert back.startswith(given[:36]) and back.endswith("-01") and back != given
    for bad in (None, "00-xyz", "00-" + "0" * 32 + "-00f067aa0ba902b7-01"):
        made = httpx.post(url, json=body, headers={} if bad is None else {"traceparent": bad}).headers["traceparent"]
        assert len(made) == 55 and "0" * 32 not in made


def test_metrics_and_slow_requests() -> None:
    """Promise: Prometheus reads latencies by path, counts and levels; a slow request can be looked up by its trace."""
    with serving(slow_ms=0.001) as one, Client(one.url, MODEL) as client:
        for _ in range(3):
            client.rank("m", a_history(30), np.arange(4), NOW)
        with pytest.raises(ServingError):
            client.rank("m", a_history(30), np.arange(4), now=-5)
        one.instance.compute.post(lambda relay: None)
        text = httpx.get(f"{one.url}/metrics").text
        assert 'nestpipe_rank_seconds_count{path="hit"} 2.0' in text
        assert 'nestpipe_answers_total{status="400"} 1.0' in text
        for name in ("arena_bytes", "arena_limit", "dram_bytes", "queue", "pins"):
            assert f"nestpipe_{name} " in text
        slow = httpx.get(f"{one.url}/debug/slow").json()
        assert len(slow) == 3 and slow[0]["path"] == "hit" and slow[-1]["steps_ms"].keys() == {"block", "open"}
        assert len(slow[0]["trace"]) == 32


def test_health_before_and_after() -> None:
    """Promise: ready only once the model is warm, and no longer when draining; live all the time."""
    with serving() as one:
        one.app.draining = True
        assert httpx.get(f"{one.url}/v2/health/ready").status_code == 503
        assert httpx.get(f"{one.url}/v2/health/live").status_code == 200
        with Client(one.url, MODEL) as client, pytest.raises(ServingError, match="shutting down"):
            client.rank("a", a_history(3), np.arange(2), NOW)
        one.app.draining, instance = False, one.app._inference
        one.app._inference = None
        with Client(one.url, MODEL) as client, pytest.raises(ServingError, match="not warm"):
            client.rank("a", a_history(3), np.arange(2), NOW)
        one.app._inference = instance
        one.instance.compute.stop()
        assert httpx.get(f"{one.url}/v2/health/live").status_code == 503  # nothing would ever be ranked


def test_a_recording_can_be_replayed(tmp_path: Path) -> None:
    """Promise: what was recorded, sent again, gives the same answers."""
    with serving(record=tmp_path / "r.jsonl") as one, Client(one.url, MODEL) as client:
        client.preinfer("a", a_history(30), due_ms=10)
        first = client.rank("a", a_history(30), np.arange(7), NOW)
    with serving() as other, httpx.Client(base_url=other.url) as http:
        recorded = list(read_recording(tmp_path / "r.jsonl"))
        answers = [http.request(one.method, one.path, content=one.body, headers=one.headers) for one in recorded]
    assert [answer.status_code for answer in answers] == [202, 200]
    assert answers[1].content.endswith(first.scores.tobytes())


def test_swaps_under_load_mix_nothing() -> None:
    """Promise: while versions change, every request is answered, by one version, with that version's bits."""
    with serving() as one:
        stop, wrong, seen = threading.Event(), [], set()

        def load(seed: int) -> None:
            with Client(one.url, MODEL) as client:
                while not stop.is_set():
                    client.preinfer(f"s{seed}", a_history(30, seed), due_ms=5)
                    ranked = client.rank(f"s{seed}", a_history(30, seed), np.arange(16), NOW)
                    seen.add(ranked.version)
                    if ranked.scores.tobytes() != expected(30, seed, np.arange(16), ranked.version):
                        wrong.append(ranked)

        threads = [threading.Thread(target=load, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for version in range(2, 8):
            one.source.versions.append(str(version))
            assert httpx.post(f"{one.url}/v2/repository/models/{MODEL}/load", timeout=30).json() == {
                "version": str(version)
            }
        stop.set()
        for thread in threads:
            thread.join(20)
        assert not wrong and len(seen) > 2
        assert one.settled(lambda now: now["holds"] == 0 or now["pins"] == now["holds"])


def test_follow_loads_every_new_checkpoint() -> None:
    """Promise: --follow notices a newer checkpoint by itself, and one that cannot be loaded is tried once."""
    opened: list[str] = []

    def make(version: str) -> FakeModel:
        opened.append(version)
        if version == "bad":
            raise OSError(5, "Input/output error", "step-bad")
        return FakeModel(version)

    with serving(FakeSource(make)) as one:
        loaded = threading.Event()
        one.instance.loader.follow(0.01, lambda version: loaded.set())
        one.source.versions.append("bad")
        while "bad" not in opened:
            pass
        one.source.versions.append("2")
        assert loaded.wait(20)
        with Client(one.url, MODEL) as client:
            assert client.rank("a", a_history(9), np.arange(3), NOW).version == "2"
    assert opened.count("bad") == 1


def test_metadata_tells_what_to_send(served: Served) -> None:
    """Promise: inputs, the output, actions and the window can be asked for; an unknown model is a 404 that names ours."""
    found = httpx.get(f"{served.url}/v2/models/{MODEL}").json()
    assert found["parameters"]["actions"] == ["click", "like"] and found["parameters"]["max_length"] == 32
    unknown = httpx.get(f"{served.url}/v2/models/other")
    assert unknown.status_code == 404 and MODEL in unknown.json()["error"]
    assert httpx.get(f"{served.url}/v2/models/{MODEL}/infer").status_code == 405
    assert json.loads(httpx.get(f"{served.url}/v2").text)["name"] == "nestpipe"


def test_context_features_reach_the_model() -> None:
    """Promise: a feature that the model has is an input `context_NAME`; blocks of another context are never used."""

    class WithContext(FakeModel):
        context = ("hour",)

        def _events(self, history: Any, first: int, stop: int, now: int = 0) -> float:
            hours = history.context.get("hour")
            return super()._events(history, first, stop, now) + (
                0.0 if hours is None else float(hours[first:stop].sum())
            )

    history = a_history(30, 1)
    with serving(FakeSource(WithContext)) as one, Client(one.url, MODEL) as client:
        for hours in (None, np.arange(30), np.arange(30) % 7):
            context = {} if hours is None else {"hour": hours}
            asked = replace(history, context=context)
            scores = client.rank("c", asked, np.arange(5), NOW).scores
            assert scores.tobytes() == full_scores(WithContext(), asked, NOW, np.arange(5)).tobytes()
        with pytest.raises(ServingError, match="context_hour"):
            client.rank("c", replace(history, context={"hour": np.arange(3)}), np.arange(5), NOW)
        with pytest.raises(ServingError, match="unknown input 'context_day'"):
            client.rank("c", replace(history, context={"day": np.arange(30)}), np.arange(5), NOW)
