"""Events of one user at one time: how many there are, and in what order they come.

file    as in the files
random  drawn: depends on (seed, user, the event's place among the user's)
meta    as Meta's research code has them, which sorts all events by time, unstably, and then takes each user's (`introsort`)
"""

from __future__ import annotations

from typing import Literal

import numba
import numpy as np

from nestpipe.data.counter import STEP, derive, mix
from nestpipe.data.introsort import introsort

Ties = Literal["file", "random", "meta"]
TIES: tuple[Ties, ...] = ("file", "random", "meta")


def sort_events(user: np.ndarray, time: np.ndarray, ties: Ties, seed: int) -> np.ndarray:
    """The order by user, then by time, of events in the order of their file."""
    if ties == "meta":
        by_time = introsort(time)
        return by_time[np.argsort(user[by_time], kind="stable")]
    order = np.lexsort((time, user))  # stable: what is equal stays in the order of the file
    if ties == "random":
        ordered = user[order]
        order = order[shuffle_ties(ordered, user_offsets(ordered), time[order], seed)]
    return order


def user_offsets(user: np.ndarray) -> np.ndarray:
    """Where each user's events begin, and the end, of events that are ordered by user."""
    starts = np.flatnonzero(user[1:] != user[:-1]) + 1
    return np.concatenate([np.zeros(1, np.int64), starts, np.full(int(len(user) > 0), len(user))])


def shuffle_ties(user: np.ndarray, offsets: np.ndarray, time: np.ndarray, seed: int) -> np.ndarray:
    """The order that moves only events of one user at one time.  `user` and `time` are those of all events, in order."""
    return _shuffle_ties(
        np.ascontiguousarray(user, np.int64), offsets, np.ascontiguousarray(time, np.int64), derive(seed, "ties")
    )


@numba.njit(nogil=True, cache=True)
def _shuffle_ties(user: np.ndarray, offsets: np.ndarray, time: np.ndarray, key: np.uint64) -> np.ndarray:
    order = np.arange(user.shape[0])
    for one in range(offsets.shape[0] - 1):
        first, stop = offsets[one], offsets[one + 1]
        if first == stop:
            continue
        own = mix(key + np.uint64(user[first]) * STEP)
        tie = first
        for at in range(first + 1, stop):
            if time[at] != time[at - 1]:
                tie = at
            # Fisher-Yates, inside out: after each event, every order of this tie is as likely as any other.
            other = tie + np.int64(mix(own + np.uint64(at - first) * STEP) % np.uint64(at - tie + 1))
            order[at] = order[other]
            order[other] = at
    return order


def count_ties(offsets: np.ndarray, time: np.ndarray) -> dict[str, int]:
    """Events at the time of the event before them, of the same user; users who have such events; and users whose last event
    is one: what is held out of those depends on the order of ties."""
    events, users, last = _count_ties(np.ascontiguousarray(offsets, np.int64), np.ascontiguousarray(time, np.int64))
    return {"events": int(events), "users": int(users), "last": int(last)}


@numba.njit(nogil=True, cache=True)
def _count_ties(offsets: np.ndarray, time: np.ndarray) -> tuple[int, int, int]:
    events, users, last = 0, 0, 0
    for one in range(offsets.shape[0] - 1):
        before = events
        for at in range(offsets[one] + 1, offsets[one + 1]):
            events += time[at] == time[at - 1]
        users += events > before
        stop = offsets[one + 1]
        if stop - offsets[one] > 1 and time[stop - 1] == time[stop - 2]:
            last += 1
    return events, users, last
