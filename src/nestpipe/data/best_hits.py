"""The best hit rate that any model can reach on generated histories, from the true chances of the next item.

An evaluation ranks a user's next item among all items but those in the history that the model was shown; the next item itself
is never left out.  So items that were shown do not compete with others, and the best ranking hits whenever the next item was
shown, and when it is one of the k likeliest items that were not.  The chance of that is known, because the user's interest is.
A model must guess the interest from the history: this is an upper bound.
"""

from __future__ import annotations

import numba
import numpy as np

from nestpipe.data.counter import STEP, mix
from nestpipe.data.long_histories_kernels import (
    World,
    draw_events,
    draw_lengths,
    follower,
    group_size,
    group_spans,
    interest,
)


@numba.njit(nogil=True, cache=True)
def chance_of_rank(rank: int, group: int, spans: tuple[float, float], world: World) -> float:
    """Of the item at a rank of a group, in a draw from that group."""
    size = group_size(group, world)
    span = spans[0] if size == group_size(0, world) else spans[1]
    if world.zipf == 1.0:
        return np.log((rank + 2.0) / (rank + 1.0)) / span
    power = 1.0 - world.zipf
    return ((rank + 2.0) ** power - (rank + 1.0) ** power) / span


@numba.njit(nogil=True, cache=True)
def next_interests(number: int, at: int, world: World) -> tuple[np.ndarray, np.ndarray, float]:
    """Of event `at` of a user, from all that is known before it: groups that it may be drawn from, each with its chance, and the
    chance that it follows from the event before instead."""
    user = mix(world.user_key + np.uint64(number) * STEP)
    session = at // world.session
    if at % world.session:
        return np.array([interest(user, session, world)]), np.array([1.0 - world.order]), world.order
    group = interest(user, session - 1, world)
    groups = np.empty(3, np.int64)
    chances = np.zeros(3)
    count = 0
    for move in (0, 1, -1):
        there = (group + move) % world.groups
        chance = 1.0 - world.drift if move == 0 else 0.5 * world.drift
        place = count
        for known in range(count):  # on a ring of one or two groups some are the same
            if groups[known] == there:
                place = known
        groups[place] = there
        chances[place] += chance
        count = max(count, place + 1)
    return groups[:count], chances[:count], 0.0


@numba.njit(nogil=True, cache=True)
def best_hits(users: np.ndarray, max_length: int, top: np.ndarray, world: World) -> np.ndarray:
    """[users, top]: the chance that the best ranking has each user's last item among the first top[k]."""
    spans = group_spans(world)
    found = np.empty((users.shape[0], top.shape[0]))
    lengths = draw_lengths(users, world)
    items, times = np.empty(max_length, np.int64), np.empty(max_length, np.int64)
    most = top.max()
    for u in range(users.shape[0]):
        last = lengths[u] - 1
        n = min(last, max_length)
        draw_events(users[u], last - n, last, spans, world, items, times)
        groups, chances, follows = next_interests(users[u], last, world)
        following = follower(items[n - 1], spans, world)
        shown = np.unique(items[:n])

        hit = 0.0
        for number in shown:
            for g in range(groups.shape[0]):
                if number % world.groups == groups[g]:
                    hit += chances[g] * chance_of_rank(number // world.groups, groups[g], spans, world)
            if number == following:
                hit += follows

        # The likeliest items that were not shown: the first of each group, and the one that follows.
        others = np.zeros(groups.shape[0] * most + 1)
        count = 1
        new = not _holds(shown, following)
        if new:
            others[0] = follows
        for g in range(groups.shape[0]):
            taken, rank, size = 0, 0, group_size(groups[g], world)
            while taken < most and rank < size:
                number = rank * world.groups + groups[g]
                chance = chances[g] * chance_of_rank(rank, groups[g], spans, world)
                if number == following and new:
                    others[0] += chance
                elif not _holds(shown, number):
                    others[count] = chance
                    count += 1
                    taken += 1
                rank += 1
            if new and following % world.groups == groups[g] and following // world.groups >= rank:
                others[0] += chances[g] * chance_of_rank(following // world.groups, groups[g], spans, world)
        ranked = -np.sort(-others[:count])
        for k in range(top.shape[0]):
            found[u, k] = hit + ranked[: top[k]].sum()
    return found


@numba.njit(nogil=True, cache=True, inline="always")
def _holds(ascending: np.ndarray, number: int) -> bool:
    place = np.searchsorted(ascending, number)
    return place < ascending.shape[0] and ascending[place] == number
