"""The kernels that draw long histories.  They release the GIL; every number is drawn by counter, so that a history can be
drawn from the middle.

A history is a list of sessions of `session` events.  Interests are a ring of groups.  A session has one interest; the next
session's is the same or, with the chance `drift`, the group to the left or right of it.  The first item of a session is drawn
from its interest's power law.  Each further item follows from the one before it, with the chance `order`, or is drawn too.

Item number i is in group i % groups, at rank i // groups of it.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from nestpipe.data.counter import STEP, bell, mix, power_law_rank, power_law_span, uniform

_ONE, _TWO, _THREE = (np.uint64(n) for n in (1, 2, 3))
_SESSION = np.uint64(1 << 40)
"""Draws of sessions have numbers from here on; draws of events are below."""
_FIRST_TIME = 1_000_000_000
LONGEST_GAP = 600
"""Seconds between two events of a session, at most; a session has a slot of so many for each of its events."""


class World(NamedTuple):
    """What all users share: the settings, and keys from the seed."""

    items: int
    groups: int
    zipf: float
    order: float
    drift: float
    session: int
    median: float
    sigma: float
    least: int
    item_key: np.uint64
    follow_key: np.uint64
    user_key: np.uint64


@numba.njit(nogil=True, cache=True, inline="always")
def item_id(number: int, world: World) -> np.int64:
    return np.int64(mix(world.item_key + np.uint64(number)))


@numba.njit(nogil=True, cache=True)
def item_ids(world: World) -> np.ndarray:
    """Of all items: all different (`mix` is a bijection), in no order."""
    ids = np.empty(world.items, np.int64)
    for number in range(world.items):
        ids[number] = item_id(number, world)
    return ids


@numba.njit(nogil=True, cache=True)
def draw_lengths(users: np.ndarray, world: World) -> np.ndarray:
    """Events of these users: log-normal."""
    lengths = np.empty(users.shape[0], np.int64)
    for at in range(users.shape[0]):
        bits = mix(mix(world.user_key + np.uint64(users[at]) * STEP) + _ONE)
        lengths[at] = max(world.least, int(world.median * np.exp(world.sigma * bell(bits)) + 0.5))
    return lengths


@numba.njit(nogil=True, cache=True, inline="always")
def group_size(group: int, world: World) -> int:
    return (world.items - group + world.groups - 1) // world.groups


@numba.njit(nogil=True, cache=True)
def group_spans(world: World) -> tuple[float, float]:
    """Of the power law: in groups of the size of the first one, and of the last one.  There are no others."""
    first, last = group_size(0, world), group_size(world.groups - 1, world)
    return power_law_span(first, world.zipf), power_law_span(last, world.zipf)


@numba.njit(nogil=True, cache=True, inline="always")
def draw_item(u: float, group: int, spans: tuple[float, float], world: World) -> int:
    size = group_size(group, world)
    span = spans[0] if size == group_size(0, world) else spans[1]
    return power_law_rank(u, size, world.zipf, span) * world.groups + group


@numba.njit(nogil=True, cache=True, inline="always")
def follower(number: int, spans: tuple[float, float], world: World) -> int:
    """The item that follows this one: of its group, by the power law, always the same."""
    u = uniform(mix(world.follow_key + np.uint64(number) * STEP))
    return draw_item(u, number % world.groups, spans, world)


@numba.njit(nogil=True, cache=True)
def interest(user: np.uint64, session: int, world: World) -> int:
    """The group of a session: a walk from a group of the user's own."""
    group = int(uniform(mix(user + _TWO)) * world.groups)
    for s in range(1, session + 1):
        group = (group + step(user, s, world)) % world.groups
    return group


@numba.njit(nogil=True, cache=True, inline="always")
def step(user: np.uint64, session: int, world: World) -> int:
    """From the session before to this one: -1, 0 or 1."""
    u = uniform(mix(user + (_SESSION + np.uint64(session)) * STEP))
    if u >= world.drift:
        return 0
    return 1 if u < 0.5 * world.drift else -1


@numba.njit(nogil=True, cache=True)
def draw_events(
    number: int, first: int, stop: int, spans: tuple[float, float], world: World, items: np.ndarray, times: np.ndarray
) -> None:
    """Item numbers and times of events first..stop of a user."""
    user = mix(world.user_key + np.uint64(number) * STEP)
    session = first // world.session
    group = interest(user, session, world)
    begin = _FIRST_TIME + int(uniform(mix(user + _THREE)) * 3.0e7)
    item, time = 0, 0
    for at in range(session * world.session, stop):
        bits = mix(user + np.uint64(at + 1) * STEP)
        if at % world.session == 0:
            now = at // world.session
            if now > session:
                group = (group + step(user, now, world)) % world.groups
            session = now
            time = begin + at * LONGEST_GAP
            item = draw_item(uniform(mix(bits + _ONE)), group, spans, world)
        else:
            time += 1 + min(LONGEST_GAP - 1, int(np.exp(3.0 + 1.5 * bell(mix(bits + _TWO)))))
            if uniform(bits) < world.order:
                item = follower(item, spans, world)
            else:
                item = draw_item(uniform(mix(bits + _ONE)), group, spans, world)
        if at >= first:
            items[at - first] = item
            times[at - first] = time


@numba.njit(nogil=True, cache=True)
def draw_batch(  # type: ignore[no-untyped-def]
    users, train, max_length, negatives, key, world
):
    """Lengths [4*B] and values of history, target, negatives and time of these users, feature-major, as `build_sequences`."""
    count = users.shape[0]
    spans = group_spans(world)
    lengths = np.empty(4 * count, np.int64)
    stops = draw_lengths(users, world)  # one after the last target
    history, target = 0, 0
    for b in range(count):
        stops[b] -= 1 if train else 0
        n = min(stops[b] - 1, max_length)
        terms = n if train else 1
        lengths[b] = n
        lengths[count + b] = terms
        lengths[2 * count + b] = terms * negatives
        lengths[3 * count + b] = n + 1
        history += n
        target += terms

    values = np.empty(2 * history + count + target * (1 + negatives), np.int64)
    at_history, at_target, at_negative = 0, history, history + target
    at_time = history + target * (1 + negatives)
    items = np.empty(max_length + 1, np.int64)
    for b in range(count):
        n, terms = lengths[b], lengths[count + b]
        draw_events(users[b], stops[b] - 1 - n, stops[b], spans, world, items, values[at_time : at_time + n + 1])
        for i in range(n + 1):
            items[i] = item_id(items[i], world)
        values[at_history : at_history + n] = items[:n]
        values[at_target : at_target + terms] = items[n + 1 - terms : n + 1]
        own = mix(key + np.uint64(users[b]) * STEP)
        for i in range(terms * negatives):
            u = uniform(mix(own + np.uint64(i) * STEP))
            values[at_negative + i] = item_id(min(int(u * world.items), world.items - 1), world)
        at_history += n
        at_target += terms
        at_negative += terms * negatives
        at_time += n + 1
    return lengths, values


@numba.njit(nogil=True, cache=True)
def draw_pool(size, key, world):  # type: ignore[no-untyped-def]
    """Ids of uniformly drawn items."""
    ids = np.empty(size, np.int64)
    for i in range(size):
        u = uniform(mix(key + np.uint64(i) * STEP))
        ids[i] = item_id(min(int(u * world.items), world.items - 1), world)
    return ids
