"""How a worker ends on a signal.  Imports nothing heavy: a worker is to be in order before torch is loaded."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

GRACE_SECONDS = 1.0
LAUNCHER = "NESTPIPE_LAUNCHER"
"""Names the process that has started this worker."""

last_words: list[Callable[[], None]] = []
"""What a worker still does when a signal ends it: short, and from a thread of its own while the others run on."""

_orderly: list[tuple[Callable[[], None], float]] = []
"""How to ask for an orderly end, where there is a way, and how many seconds it may take."""
_watched = False


@contextmanager
def ending_orderly(ask: Callable[[], None], seconds: float) -> Iterator[None]:
    """While entered, the first SIGTERM calls `ask` and lets the process end by itself; after `seconds` it is ended."""
    entry = (ask, seconds)
    _orderly.append(entry)
    before = None
    if not _watched and threading.current_thread() is threading.main_thread():

        def answer(number: int, frame: object) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the next one means it
            ask()
            threading.Thread(target=_end_after, args=(seconds, number), name="nestpipe-patience", daemon=True).start()

        before = signal.signal(signal.SIGTERM, answer)
    try:
        yield
    finally:
        _orderly.remove(entry)
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _end_after(seconds: float, number: int) -> None:
    time.sleep(seconds)
    late = f"nestpipe: stopped with nothing new saved: it took longer than checkpoint.stop_seconds, {seconds:g}\n"
    os.write(2, late.encode())
    os._exit(128 + number)


_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """A worker whose launcher is killed goes with it: it must not go on writing where the run is resumed meanwhile."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = int(os.environ.get(LAUNCHER, os.getppid()))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # it was killed before this worker could say so
        os._exit(128 + signal.SIGKILL)


def end_on_signals() -> None:
    """Lets SIGINT and SIGTERM end this worker even while it is blocked in an exchange; call it before threads start.

    After SIGTERM there is an orderly end where there is a way to one (`ending_orderly`); else a moment's grace: the launcher
    sends it when another worker has failed, and an exchange with a dead worker fails at once, so that this one can still say
    what it was doing.
    """
    global _watched
    _watched = True
    end_with_launcher()
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def watch() -> None:
        received = signal.sigwait(signals)
        until = time.monotonic() + GRACE_SECONDS
        while received == signal.SIGTERM and not _orderly and time.monotonic() < until:
            time.sleep(0.01)
        if received == signal.SIGTERM and _orderly:  # maybe only now: training that begins meanwhile is not cut off
            ask, seconds = _orderly[-1]
            ask()
            signal.sigtimedwait(signals, seconds)  # another one, or too late: then at once
        for say in tuple(last_words):
            with suppress(Exception):
                say()
        os._exit(128 + received)

    threading.Thread(target=watch, name="nestpipe-signals", daemon=True).start()
