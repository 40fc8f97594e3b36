"""Requests to a server: tried again while the connection is lost, given up at a deadline.

A request runs on a thread of its own.  One that blocks for ever, whatever the reason, keeps that thread and not the run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from nestpipe.files.errors import FileError, explain, is_passing, unreachable
from nestpipe.files.url import Url

T = TypeVar("T")

MOST_SECONDS = 30.0
"""A server that does not answer for so long is given up."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0

_limit = MOST_SECONDS
_blocked: list[threading.Thread] = []


def limit_waiting(timeout: float) -> None:
    """Called by a run: its workers wait `timeout` seconds for each other, and must hear of a lost server before that."""
    global _limit
    _limit = min(MOST_SECONDS, timeout / 2)


def waits_for() -> float:
    """Seconds until a server is given up."""
    return _limit


def left_behind() -> bool:
    """Whether a request that was given up still blocks its thread: the process cannot end in the usual way."""
    return any(thread.is_alive() for thread in _blocked)


def insist(url: Url, act: Callable[[], T], *, again: bool = True) -> T:
    """The result of a request.  FileNotFoundError as it comes; FileError for everything else that goes wrong.

    `again`: it may be repeated while the connection is lost.
    """
    seconds = _limit
    until = time.monotonic() + seconds
    pause = FIRST_PAUSE
    first: OSError | None = None
    while True:
        try:
            return _on_a_thread(act, until)
        except (FileNotFoundError, FileError):
            raise
        except OSError as error:
            if not is_passing(url, error):
                raise explain(url, error) from None
            first = first or error  # the last one may only say that time is over
            if not again or time.monotonic() + pause >= until:
                raise unreachable(url, first, seconds) from None
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def _on_a_thread(act: Callable[[], T], until: float) -> T:
    done = threading.Event()
    result: list[Any] = []

    def run() -> None:
        try:
            result.append((act(), None))
        except BaseException as error:
            result.append((None, error))
        finally:
            done.set()

    thread = threading.Thread(target=run, name="nestpipe-request", daemon=True)
    thread.start()
    if not done.wait(max(0.0, until - time.monotonic())):
        _blocked.append(thread)
        raise TimeoutError("no answer")
    value, error = result[0]
    if error is not None:
        raise error
    found: T = value
    return found
