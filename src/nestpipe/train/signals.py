"""How a worker ends on a signal.  Imports nothing heavy: a worker is to be in order before torch is loaded."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

GRACE_SECONDS = 1.0

last_words: list[Callable[[], None]] = []
"""What a worker still does when a signal ends it: short, and from a thread of its own while the others run on."""


def end_on_signals() -> None:
    """Lets SIGINT and SIGTERM end this worker even while it is blocked in an exchange; call it before threads start.

    After SIGTERM, which the launcher sends when another worker has failed, there is a moment's grace: an exchange with a dead
    worker fails at once, and this one can still say what it was doing.
    """
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    def watch() -> None:
        received = signal.sigwait(signals)
        if received == signal.SIGTERM:
            time.sleep(GRACE_SECONDS)
        for say in tuple(last_words):
            with suppress(Exception):
                say()
        os._exit(128 + received)

    threading.Thread(target=watch, name="nestpipe-signals", daemon=True).start()
