"""How a worker ends on a signal.  Imports nothing heavy: a worker must be ready for signals before torch is loaded."""

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
"""The environment variable with the process id of the launcher that started this worker."""

last_words: list[Callable[[], None]] = []
"""What a worker still does when a signal ends it.  Must be short; runs in its own thread while the others continue."""

_orderly: list[tuple[Callable[[], None], float]] = []
"""How to request an orderly end, if there is a way, and how many seconds it may take."""
_watched = False


@contextmanager
def ending_orderly(ask: Callable[[], None], seconds: float) -> Iterator[None]:
    """Inside, the first SIGTERM calls `ask` and lets the process end by itself; it is ended after `seconds`."""
    entry = (ask, seconds)
    _orderly.append(entry)
    before = None
    if not _watched and threading.current_thread() is threading.main_thread():

        def answer(number: int, frame: object) -> None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends the process
            ask()
            threading.Thread(target=_end_after, args=(seconds, number), name="nestpipe-patience", daemon=True).start()

        before = signal.signal(signal.SIGTERM, answer)
    try:
        yield
    finally:
        _orderly.remove(entry)
        if before is not None:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def signals_held() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM are only noted, and answered at the end.

    Python drops the KeyboardInterrupt that a handler raises while it starts a process: it is inside a callback of `fork`
    then, whose exceptions nobody gets.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {n: signal.signal(n, lambda number, frame: came.append(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if came:
            signal.raise_signal(came[0])


def _end_after(seconds: float, number: int) -> None:
    time.sleep(seconds)
    late = f"nestpipe: stopped with nothing new saved: it took longer than checkpoint.stop_seconds, {seconds:g}\n"
    os.write(2, late.encode())
    os._exit(128 + number)


_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Ends this worker when its launcher is killed: it must not keep writing while the run is resumed elsewhere."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = int(os.environ.get(LAUNCHER, os.getppid()))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # killed before this worker could ask for the signal
        os._exit(128 + signal.SIGKILL)


def end_on_signals() -> None:
    """Lets SIGINT and SIGTERM end this worker even while it is blocked in an exchange; call it before threads start.

    After SIGTERM the worker ends in order if it can (`ending_orderly`), or else after a moment of grace: the launcher sends it
    when another worker has failed, and since an exchange with a dead worker fails at once, this one can still report what it was
    doing.
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
        if received == signal.SIGTERM and _orderly:  # training that starts during the grace may finish what it starts
            ask, seconds = _orderly[-1]
            ask()
            signal.sigtimedwait(signals, seconds)  # ends the worker: a second signal, or too late
        for say in tuple(last_words):
            with suppress(Exception):
                say()
        os._exit(128 + received)

    threading.Thread(target=watch, name="nestpipe-signals", daemon=True).start()
