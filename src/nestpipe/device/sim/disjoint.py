"""Annotations for the race detector: accesses that are known to touch different rows of one tensor.

The detector sees byte ranges.  A gather of some rows and an `index_add_` into others look alike to it.  Code that knows
better says so, and gives the reason.  Without an enabled device this costs one append and one pop; imports nothing heavy.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Reasons(threading.local):
    def __init__(self) -> None:
        self.active: tuple[str, ...] = ()


_reasons = _Reasons()


def active_reasons() -> tuple[str, ...]:
    """The reasons of the blocks that this thread is in, outermost first."""
    return _reasons.active


@contextmanager
def disjoint(reason: str) -> Iterator[None]:
    """Accesses issued by this thread inside are not compared with other accesses issued under the same reason."""
    before = _reasons.active
    _reasons.active = (*before, reason)
    try:
        yield
    finally:
        _reasons.active = before
