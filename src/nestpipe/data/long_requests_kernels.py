"""The kernels that draw what users do with the items of long histories.

An action's logit is a base rate of its own, plus what the item is worth, plus what the user thinks of the item's group.  The
former a model can learn by item, the latter from what the user did with items of the group before.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from nestpipe.data.counter import STEP, bell, mix, uniform
from nestpipe.data.long_histories_kernels import World, draw_events, group_spans, item_id

OF_ITEM, OF_GROUP = 1.0, 1.5
"""Standard deviations of the two parts of a logit."""
_ONE, _TWO, _THREE = (np.uint64(n) for n in (1, 2, 3))


@numba.njit(nogil=True, cache=True)
def action_logit(user: int, item: int, action: int, key: np.uint64, world: World) -> float:
    own = mix(key + np.uint64(action) * STEP)
    of_item = bell(mix(mix(own + _ONE) + np.uint64(item) * STEP))
    of_user = mix(mix(own + _TWO) + np.uint64(user) * STEP)
    of_group = bell(mix(of_user + np.uint64(item % world.groups) * STEP))
    return OF_ITEM * of_item + OF_GROUP * of_group - 0.5 * (1 + action)


@numba.njit(nogil=True, cache=True)
def draw_actions(user: int, at: int, item: int, actions: int, key: np.uint64, world: World) -> int:
    """A bit mask: what the user does at event `at`."""
    found = 0
    for action in range(actions):
        chance = 1.0 / (1.0 + math.exp(-action_logit(user, item, action, key, world)))
        of_user = mix(mix(mix(key + np.uint64(action) * STEP) + _THREE) + np.uint64(user) * STEP)
        if uniform(mix(of_user + np.uint64(at) * STEP)) < chance:
            found |= 1 << action
    return found


@numba.njit(nogil=True, cache=True)
def true_logits(users: np.ndarray, items: np.ndarray, actions: int, key: np.uint64, world: World) -> np.ndarray:
    found = np.empty((users.shape[0], actions))
    for i in range(users.shape[0]):
        for action in range(actions):
            found[i, action] = action_logit(users[i], items[i], action, key, world)
    return found


@numba.njit(nogil=True, cache=True)
def draw_requests(users, first, length, candidates, actions, key, world):  # type: ignore[no-untyped-def]
    """Values of history, candidate, time, action and label, request after request."""
    spans = group_spans(world)
    tokens, asked = length.sum(), candidates.sum()
    history, candidate = np.empty(tokens, np.int64), np.empty(asked, np.int64)
    time, action, label = (
        np.empty(tokens + users.shape[0], np.int64),
        np.empty(tokens, np.int64),
        np.empty(asked, np.int64),
    )
    most = (length + candidates).max() if users.shape[0] else 0
    items, times = np.empty(most, np.int64), np.empty(most, np.int64)
    at, to = 0, 0
    for b in range(users.shape[0]):
        n, c = length[b], candidates[b]
        draw_events(users[b], first[b], first[b] + n + c, spans, world, items, times)
        time[at + b : at + b + n + 1] = times[: n + 1]
        for i in range(n + c):
            did = draw_actions(users[b], first[b] + i, items[i], actions, key, world)
            if i < n:
                history[at + i], action[at + i] = item_id(items[i], world), did
            else:
                candidate[to + i - n], label[to + i - n] = item_id(items[i], world), did
        at += n
        to += c
    return history, candidate, time, action, label
