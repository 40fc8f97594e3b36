"""The body of a request, within its limits of size and time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
CONNECTION = "nestpipe.connection"
"""Key of a request's scope: its connection, under the server of `server.py`."""


class Refused(Exception):
    """A request that gets a status and one line instead of an answer."""

    def __init__(self, status: int, why: str, close: bool = False) -> None:
        super().__init__(why)
        self.status, self.close = status, close
        """`close`: what else comes on this connection cannot be told from the rest of the body."""


class Left(Exception):
    """The client has left before its request was complete."""


async def read_body(
    receive: Receive, declared: bytes | None, limit: int, seconds: float, connection: Any = None
) -> bytes:
    """The whole body; Refused where it is too large or too slow.  One that is there already needs no timer."""
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise Refused(413, f"the body has {declared.decode()} bytes, more than the {limit} allowed", close=True)
    if connection is not None and declared is not None and not connection.cycle.more_body:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Left
        return bytes(message.get("body", b""))
    try:
        async with asyncio.timeout(seconds):
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Left
            body: bytes = message.get("body", b"")
            if not message.get("more_body"):
                return body
            parts, size = [body], len(body)
            while message.get("more_body"):
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Left
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > limit:
                    raise Refused(413, f"the body has more than the {limit} bytes allowed", close=True)
            return b"".join(parts)
    except TimeoutError:
        raise Refused(408, f"the body did not arrive within {seconds:g} s", close=True) from None
