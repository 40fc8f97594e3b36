"""Clients of an instance, for threads and for asyncio.  Tensors travel as raw bytes."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np

from nestpipe.errors import NestPipeError
from nestpipe.infer.contract import History
from nestpipe.serve.http.tensors import HEADER_LENGTH, decode, encode


class ServingError(NestPipeError):
    """The instance's answer is not a ranking; `status` is its HTTP status."""

    def __init__(self, status: int, why: str, retry_after: float | None = None) -> None:
        super().__init__(why)
        self.status, self.retry_after = status, retry_after


@dataclass(frozen=True)
class Ranked:
    """Scores, float32 [candidates, actions], and how they came about."""

    scores: np.ndarray
    path: str
    version: str
    instance: str


def _history(history: History) -> dict[str, np.ndarray]:
    return {
        "history_items": np.asarray(history.items, "<i8"),
        "history_actions": np.asarray(history.actions, "<i4"),
        "history_times": np.asarray(history.times, "<i8"),
        "history_start": np.array([history.start], "<i8"),
        **{f"context_{name}": np.asarray(values, "<i8") for name, values in history.context.items()},
    }


class _Calls:
    """What both clients send, and how they read the answers."""

    def __init__(self, url: str, model: str, timeout: float) -> None:
        self._base, self._model, self._timeout = url.rstrip("/"), model, timeout

    def _options(self) -> dict[str, Any]:
        return {"base_url": self._base, "timeout": self._timeout}

    def _rank(
        self,
        user: str | int,
        history: History,
        candidates: np.ndarray,
        now: int,
        deadline_ms: float | None,
        headers: dict[str, str] | None,
    ) -> dict[str, Any]:
        inputs = {**_history(history), "candidates": np.asarray(candidates, "<i8"), "now": np.array([now], "<i8")}
        body, length = encode({"parameters": {"binary_data_output": True}}, "inputs", inputs)
        sent = {**(headers or {}), HEADER_LENGTH: str(length), **_user(user)}
        if deadline_ms is not None:
            sent["x-deadline-ms"] = str(deadline_ms)
        return {"method": "POST", "url": f"/v2/models/{self._model}/infer", "content": body, "headers": sent}

    def _preinfer(self, user: str | int, history: History, due_ms: float | None) -> dict[str, Any]:
        body, length = encode({}, "inputs", _history(history))
        sent = {HEADER_LENGTH: str(length), **_user(user), **({} if due_ms is None else {"x-due-ms": str(due_ms)})}
        return {"method": "POST", "url": f"/v2/models/{self._model}/preinfer", "content": body, "headers": sent}

    def _cancel(self, user: str | int) -> dict[str, Any]:
        return {"method": "DELETE", "url": f"/v2/models/{self._model}/preinfer", "headers": _user(user)}

    @staticmethod
    def _ranked(response: httpx.Response) -> Ranked:
        _check(response)
        length = response.headers.get(HEADER_LENGTH)
        head, tensors = decode(response.content, None if length is None else int(length), "outputs")
        headers = response.headers
        return Ranked(tensors["scores"], headers["x-relay"], head["model_version"], headers["x-relay-instance"])

    @staticmethod
    def _json(response: httpx.Response) -> dict[str, Any]:
        _check(response)
        answer: dict[str, Any] = response.json()
        return answer


def _user(user: str | int) -> dict[str, str]:
    return {"x-user": str(user)} if user != "" else {}


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        why = str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        why = response.text[:200]
    after = response.headers.get("retry-after")
    raise ServingError(response.status_code, why, None if after is None else float(after))


class Client(_Calls):
    """For threads: one client may be used by several."""

    def __init__(self, url: str, model: str, timeout: float = 30.0) -> None:
        super().__init__(url, model, timeout)
        self._http = httpx.Client(**self._options())

    def rank(
        self,
        user: str | int,
        history: History,
        candidates: np.ndarray,
        now: int,
        deadline_ms: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> Ranked:
        """Scores of the candidates; ServingError where there are none."""
        return self._ranked(self._http.request(**self._rank(user, history, candidates, now, deadline_ms, headers)))

    def preinfer(self, user: str | int, history: History, due_ms: float | None = None) -> dict[str, Any]:
        """Has the user's prefix computed ahead; tells `instance`, `admitted` and `reason`."""
        return self._json(self._http.request(**self._preinfer(user, history, due_ms)))

    def cancel(self, user: str | int) -> bool:
        """No ranking of this user will come; False if none was expected."""
        return bool(self._json(self._http.request(**self._cancel(user)))["cancelled"])

    def ready(self) -> bool:
        try:
            return self._http.get("/v2/health/ready").is_success
        except httpx.TransportError:
            return False

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(_Calls):
    """For asyncio."""

    def __init__(self, url: str, model: str, timeout: float = 30.0) -> None:
        super().__init__(url, model, timeout)
        self._http = httpx.AsyncClient(**self._options())

    async def rank(
        self,
        user: str | int,
        history: History,
        candidates: np.ndarray,
        now: int,
        deadline_ms: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> Ranked:
        """Scores of the candidates; ServingError where there are none.  Cancelling it stops the instance's compute, too."""
        request = self._rank(user, history, candidates, now, deadline_ms, headers)
        return self._ranked(await self._http.request(**request))

    async def preinfer(self, user: str | int, history: History, due_ms: float | None = None) -> dict[str, Any]:
        """Has the user's prefix computed ahead; tells `instance`, `admitted` and `reason`."""
        return self._json(await self._http.request(**self._preinfer(user, history, due_ms)))

    async def cancel(self, user: str | int) -> bool:
        """No ranking of this user will come; False if none was expected."""
        return bool(self._json(await self._http.request(**self._cancel(user)))["cancelled"])

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
