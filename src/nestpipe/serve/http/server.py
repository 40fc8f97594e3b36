"""The server around the application: sockets, connections that send nothing, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nestpipe.config.serving import ServingConfig
from nestpipe.serve.http.app import App
from nestpipe.serve.http.body import CONNECTION

KEEP_ALIVE_SECONDS = 75
"""Longer than what clients and routers keep an idle connection for: at uvicorn's 5 s they send into closed ones."""
SWITCH_SECONDS = 0.0005
"""How long one Python thread may keep the other waiting: the compute thread and the event loop take turns often."""


def connection(head_seconds: float) -> type[HttpToolsProtocol]:
    """Connections that must send the head of a request within `head_seconds` of its first byte."""

    class Connection(HttpToolsProtocol):
        _head: asyncio.TimerHandle | None = None
        on_lost: Callable[[], None] | None = None
        """What the request in progress wants to be told; a task that waits for it would cost more than all else here."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._await_head(KEEP_ALIVE_SECONDS)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            cast(dict[str, Any], self.scope)[CONNECTION] = self
            self._await_head(head_seconds)

        def on_headers_complete(self) -> None:
            self._no_wait()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._no_wait()
            super().connection_lost(exc)
            if self.on_lost is not None:
                self.on_lost()

        def _await_head(self, seconds: float) -> None:
            self._no_wait()
            self._head = self.loop.call_later(seconds, self.transport.close)

        def _no_wait(self) -> None:
            if self._head is not None:
                self._head.cancel()
                self._head = None

    return Connection


class Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: two of them share a process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int, flag: str) -> socket.socket:
    """ValueError, naming the flag, where the port is taken."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ValueError(f"{flag} {port} on {host} cannot be used ({error.strerror}): choose another one") from None
    sock.listen(2048)
    return sock


def server(app: App, config: ServingConfig) -> Server:
    return Server(
        uvicorn.Config(
            app,
            http=connection(config.body_seconds),
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=max(1, round(config.drain_seconds)),
        )
    )


async def run(apps: list[tuple[App, socket.socket]], config: ServingConfig, opening: asyncio.Task[Any]) -> None:
    """Serves until SIGTERM or SIGINT, or until `opening` fails; then lets running requests end.  A second signal ends at once."""
    sys.setswitchinterval(SWITCH_SECONDS)
    servers = [server(app, config) for app, _ in apps]
    loop = asyncio.get_running_loop()

    def drain() -> None:
        for (app, _), one in zip(apps, servers):
            app.draining = True
            one.force_exit = one.should_exit
            one.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain)
    opening.add_done_callback(lambda done: drain() if done.cancelled() or done.exception() else None)
    try:
        await asyncio.gather(*(one.serve([sock]) for one, (_, sock) in zip(servers, apps)))
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    if opening.done():
        await opening
