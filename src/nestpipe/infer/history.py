"""Histories on the fixed grid of blocks: windows that move rarely, blocks that no later event can change, aligned memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nestpipe.data.requests import window_start
from nestpipe.errors import NestPipeError
from nestpipe.infer.contract import History

BLOCK = 64
"""Tokens of a block: the fixed grid of every product."""
CACHE_LINE = 64
"""Bytes.  A library's products may depend on where a matrix begins in memory, so every matrix begins at one."""


class HistoryError(NestPipeError, ValueError):
    """A history or a block that cannot be used; one line says why."""

    exit_code = 2


def check_history(history: History) -> History:
    """The history with arrays of the types of the contract; HistoryError where they cannot be."""
    parts = {"items": np.int64, "actions": np.int32, "times": np.int64}
    given = {name: np.asarray(getattr(history, name)) for name in parts}
    for name, values in given.items():
        if values.ndim != 1 or len(values) != len(given["items"]) or (values.size and values.dtype.kind not in "iu"):
            raise HistoryError(f"history.{name} must be {len(given['items'])} whole numbers, as history.items has")
    if history.start < 0:
        raise HistoryError(f"history.start must be at least 0, not {history.start}")
    for name, values in history.context.items():
        if np.shape(values) != given["items"].shape:
            raise HistoryError(f"history.context[{name!r}] must be {len(given['items'])} whole numbers")
    items, actions, times = (np.ascontiguousarray(given[name], kind) for name, kind in parts.items())
    return replace(history, items=items, actions=actions, times=times)


def windowed(history: History, max_length: int) -> History:
    """The last events from a multiple of the stride on, at most max_length; places count from its first event."""
    first = max(history.start, window_start(history.start + len(history), max_length))
    skip = first - history.start
    if not skip:
        return history
    return History(
        history.items[skip:],
        history.actions[skip:],
        history.times[skip:],
        first,
        {name: values[skip:] for name, values in history.context.items()},
    )


def complete_blocks(length: int) -> int:
    """The last event is held back: what its token weighs by time depends on when the next event happens."""
    return max(0, length - 1) // BLOCK


def aligned_floats(count: int) -> np.ndarray:
    """float32 [count] that begin at a cache line; not filled."""
    room = np.empty(4 * count + CACHE_LINE, np.uint8)
    start = -room.ctypes.data % CACHE_LINE
    return room[start : start + 4 * count].view(np.float32)


def check_block(block: np.ndarray, floats: int) -> None:
    """HistoryError for memory that a block cannot be computed in, or read from, with the same bits as elsewhere."""
    if block.dtype != np.float32 or block.shape != (floats,) or not block.flags.c_contiguous:
        raise HistoryError(f"a block is {floats} float32 one after another, not {block.dtype} {block.shape}")
    if block.ctypes.data % CACHE_LINE:
        raise HistoryError(f"a block must begin at a multiple of {CACHE_LINE} bytes: bits of results depend on it")
