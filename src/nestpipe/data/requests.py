"""Where in a user's events a ranking request stands: the history before it, and the events that are its candidates.

In training it stands somewhere in the events before the cut, drawn anew in every epoch; in an evaluation at the cut.  The
candidates are the next events, with what the user did as labels.  The history is the window that a server would use.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from nestpipe.data.counter import STEP, mix, uniform

STRIDES = 4
"""A window of max_length events moves by 1 / STRIDES of it."""


def window_stride(max_length: int) -> int:
    return max(1, max_length // STRIDES)


@numba.njit(nogil=True, cache=True)
def window_start(end: int, max_length: int) -> int:
    """The first event of the window that ends before event `end`: a multiple of the stride, so that it moves rarely.

    A window that dropped one event for each new one would change the place of every event, and with it all that a server has
    computed of them.
    """
    stride = max(1, max_length // STRIDES)
    least = max(0, end - max_length)
    return (least + stride - 1) // stride * stride


class Requests(NamedTuple):
    """One for each user, by numbers of the user's events."""

    first: np.ndarray
    """Of the history."""
    length: np.ndarray
    """Events of the history; the first candidate follows."""
    candidates: np.ndarray
    """How many."""


@numba.njit(nogil=True, cache=True)
def place_requests(
    numbers: np.ndarray,
    cuts: np.ndarray,
    totals: np.ndarray,
    train: bool,
    candidates: int,
    max_length: int,
    key: np.uint64,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of users with so many events before the cut, and in all: those of `Requests`.  A user's draw depends on key and number."""
    count = numbers.shape[0]
    first, length, asked = np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64)
    for b in range(count):
        at, stop = cuts[b], totals[b]
        if train:
            stop = cuts[b]
            choices = max(1, stop - candidates)
            at = 1 + min(choices - 1, int(uniform(mix(key + np.uint64(numbers[b]) * STEP)) * choices))
        first[b] = window_start(at, max_length)
        length[b] = at - first[b]
        asked[b] = min(candidates, stop - at)
    return first, length, asked
