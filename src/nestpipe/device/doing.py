"""What each thread is doing, for those who notice something about it: an error, or a wait of the host."""

from __future__ import annotations

import threading
from typing import Any

_local = threading.local()


def begin(action: Any) -> None:
    """This thread performs this action from now on; it has a stage and a batch."""
    _local.action = action


def stage() -> str:
    """The stage that this thread performs."""
    action = getattr(_local, "action", None)
    return "other" if action is None else str(action.stage)


def in_words() -> str:
    action = getattr(_local, "action", None)
    return "a collective" if action is None else f"{action.stage} of batch {action.batch}"
