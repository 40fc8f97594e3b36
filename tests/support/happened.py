"""What has happened, for threads that wait for it.  A dict that makes events on demand could make two of the same name."""

from __future__ import annotations

import threading
from collections.abc import Hashable

PATIENCE = 30.0
"""Seconds after which something that is waited for counts as never happening."""


class Happened:
    def __init__(self) -> None:
        self._all: set[Hashable] = set()
        self._more = threading.Condition()

    def add(self, name: Hashable) -> None:
        with self._more:
            self._all.add(name)
            self._more.notify_all()

    def wait_for(self, name: Hashable, seconds: float = PATIENCE) -> bool:
        """Whether it has, in time."""
        with self._more:
            return self._more.wait_for(lambda: name in self._all, seconds)
