"""POST /v2/models/{m}/infer and /preinfer: the way of a request through the instance.  Plain ASGI, for its CPU time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from nestpipe.serve.http.body import CONNECTION, Left, Receive, Refused, read_body
from nestpipe.serve.http.metrics import Metrics
from nestpipe.serve.http.recording import Recording
from nestpipe.serve.http.request import OUTPUT, ParsedRequest, parse, user_of
from nestpipe.serve.http.slow_log import SlowLog
from nestpipe.serve.http.tensors import BadRequest, encode
from nestpipe.serve.http.trace import continued
from nestpipe.serve.instance.instance import Instance
from nestpipe.serve.instance.relay import Admission, Relay
from nestpipe.serve.scheduler.jobs import Outcome, RankJob

Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

STATUS = {Outcome.DONE: 200, Outcome.FULL: 429, Outcome.EXPIRED: 504, Outcome.FAILED: 500}


class Inference:
    """The two calls that rankers make, for one instance."""

    def __init__(self, model: str, identity: str, instance: Instance, recording: Recording | None = None) -> None:
        self._model, self._identity, self._instance, self._recording = model, identity, instance, recording
        self._config, self._compute = instance.config, instance.compute
        self.metrics = Metrics(instance.compute)
        self.slow = SlowLog(self._config.slow_ms)

    async def infer(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        begun = time.monotonic()
        headers = dict(scope["headers"])
        trace, parent = continued(headers.get(b"traceparent"))
        about: Headers = [(b"traceparent", parent), (b"x-relay-instance", self._identity.encode())]
        try:
            request = await self._read(scope, headers, receive)
            job = await self._ranked(request, begun, receive, scope.get(CONNECTION))
        except Left:
            return
        except Refused as refused:
            self.metrics.answered(refused.status, None, time.monotonic() - begun)
            await answer_error(send, refused.status, str(refused), about, refused.close)
            return
        status = STATUS[job.outcome] if job.outcome is not None else 500
        nonfinite = 0
        if status == 200 and job.scores is not None and not np.isfinite(job.scores).all():
            nonfinite = int((~np.isfinite(job.scores)).any(axis=1).sum())
            about.append((b"x-nonfinite", str(nonfinite).encode()))
            if nonfinite == len(job.scores):
                status, job.why = 500, f"no score is finite: a row of the history is NaN (version {job.model.version})"
        seconds = time.monotonic() - begun
        self.metrics.answered(status, job.path.value if status == 200 else None, seconds, nonfinite)
        self.slow.ended(job, trace, seconds)
        if status != 200:
            if status == 429:
                about.append((b"retry-after", str(max(1, math.ceil(job.retry_after))).encode()))
            about.append((b"x-relay", b"rejected" if status == 429 else job.path.value.encode()))
            await answer_error(send, status, job.why, about)
            return
        about.append((b"x-relay", job.path.value.encode()))
        head: dict[str, Any] = {"model_name": self._model, "model_version": job.model.version}
        if request.id is not None:
            head["id"] = request.id
        assert job.scores is not None
        body, length = encode(head, "outputs", {OUTPUT: job.scores}, request.binary)
        if length is None:
            about.append((b"content-type", b"application/json"))
        else:
            about += [
                (b"content-type", b"application/octet-stream"),
                (b"inference-header-content-length", str(length).encode()),
            ]
        await answer(send, 200, body, about)

    async def preinfer(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        begun = time.monotonic()
        headers = dict(scope["headers"])
        about: Headers = [(b"traceparent", continued(headers.get(b"traceparent"))[1])]
        try:
            if scope["method"] == "DELETE":
                cancelled = await self._call(lambda relay: relay.cancel_preinfer(self._user(headers)))
                await answer_json(send, 200, {"instance": self._identity, "cancelled": cancelled}, about)
                return
            request = await self._read(scope, headers, receive, ranks=False)
            due = begun + request.due_ms / 1e3
            admission: Admission = await self._call(lambda relay: relay.preinfer(request.user, request.history, due))
        except Left:
            return
        except Refused as refused:
            await answer_error(send, refused.status, str(refused), about, refused.close)
            return
        told = {"instance": self._identity, "admitted": admission.admitted, "reason": admission.reason}
        await answer_json(send, 202, told, about)

    async def _read(
        self, scope: dict[str, Any], headers: dict[bytes, bytes], receive: Receive, ranks: bool = True
    ) -> ParsedRequest:
        encoding = headers.get(b"content-encoding", b"identity")
        if encoding != b"identity":
            raise Refused(
                400, f"Content-Encoding {encoding.decode('latin-1')} is not read: send it as it is", close=True
            )
        limit, seconds = self._config.max_body, self._config.body_seconds
        body = await read_body(receive, headers.get(b"content-length"), limit, seconds, scope.get(CONNECTION))
        if self._recording is not None:
            self._recording.add(scope["method"], scope["path"], headers, body)
        try:
            return parse(body, headers, self._config, len(self._instance.actions), ranks, self._instance.context)
        except BadRequest as error:
            raise Refused(400, error.one_line()) from None

    @staticmethod
    def _user(headers: dict[bytes, bytes]) -> str:
        return user_of(headers, {})

    async def _ranked(self, request: ParsedRequest, begun: float, receive: Receive, connection: Any) -> RankJob:
        """The ranking, ended; Left if its client has left, and then no further step of it runs."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[RankJob] = loop.create_future()
        started: list[RankJob] = []

        def tell(job: RankJob) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(_resolve, ended, job)

        def begin(relay: Relay) -> None:
            try:
                deadline = begun + request.deadline_ms / 1e3
                started.append(
                    relay.rank(request.user, request.history, request.now, request.candidates, deadline, tell, begun)
                )
            except Exception as error:
                loop.call_soon_threadsafe(_fail, ended, error)

        self._compute.post(begin)
        if connection is not None:
            connection.on_lost = lambda: _left(ended)
            if connection.cycle.disconnected:
                _left(ended)
        else:
            # Another server's: this returns once the client has left, or once the answer is complete.
            leaving = asyncio.ensure_future(receive())
            leaving.add_done_callback(lambda done: _left(ended))
        try:
            return await ended
        except (Left, asyncio.CancelledError):
            self._compute.post(lambda relay: relay.cancel(*started))
            raise
        finally:
            if connection is not None:
                connection.on_lost = None

    async def _call(self, call: Callable[[Relay], Any]) -> Any:
        """The result of a call that the compute thread makes between two steps."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[Any] = loop.create_future()

        def run(relay: Relay) -> None:
            try:
                result = call(relay)
            except Exception as error:
                loop.call_soon_threadsafe(_fail, ended, error)
            else:
                loop.call_soon_threadsafe(_resolve, ended, result)

        self._compute.post(run)
        return await ended


def _resolve(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        refused = Refused(400, error.one_line()) if isinstance(error, BadRequest) else Refused(500, str(error))
        future.set_exception(refused)


def _left(ended: asyncio.Future[Any]) -> None:
    if not ended.done():
        ended.set_exception(Left())


async def answer(send: Send, status: int, body: bytes, headers: Headers) -> None:
    headers = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def answer_json(send: Send, status: int, content: Any, headers: Headers) -> None:
    await answer(send, status, json.dumps(content).encode(), [*headers, (b"content-type", b"application/json")])


async def answer_error(send: Send, status: int, why: str, headers: Headers, close: bool = False) -> None:
    await answer_json(send, status, {"error": why}, [*headers, (b"connection", b"close")] if close else headers)
