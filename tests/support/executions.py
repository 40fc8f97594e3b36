"""Runs lists of actions on numbers, in any order that they allow: the plain truth that `check` must agree with.

Every row of every worker is one number.  An action hashes all that it reads, with its name, into all that it makes; so whoever
reads something else makes something else.  Shares nothing with `check` but the meaning of effects.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from nestpipe.schedule.action import Action, Name
from nestpipe.schedule.check import Violation
from nestpipe.schedule.effects import Effect, State
from nestpipe.schedule.rowclass import ELSEWHERE

PER_WORKER = {"window", "window grads", "arrived", "group grads"}
"""Of \"group grads\" every group of workers has its own: here a group has one worker."""
Uses = dict[tuple[int, int, int], frozenset[int]]
"""(key, batch, worker) -> the micro-batches in which that worker uses the key; absent where it does not."""
Place = tuple[int, int]
"""(key, worker); worker -1 at the owner; (-1, -1) for what is not rows."""
Outcome = tuple[dict[Name, int], dict[tuple[State, Place], int]]
"""What each action read, and what is left in the tables and the dense model."""


def random_uses(rng: random.Random, batches: int, micros: int) -> Uses:
    """Three keys and two workers; a key is in about half of the batches, in any of their micro-batches."""
    uses: Uses = {}
    for key in range(3):
        for batch in range(batches):
            if rng.random() < 0.6:
                for worker in rng.sample((0, 1), rng.randint(1, 2)):
                    uses[key, batch, worker] = frozenset(rng.sample(range(micros), rng.randint(1, micros)))
    return uses


def uses_of(violation: Violation, micros: int) -> Uses:
    """A key of the class in the violation, as worker 0 uses it; other workers use it in all possible ways."""
    uses: Uses = {}
    for batch, *span in violation.rows.uses:
        if tuple(span) != ELSEWHERE:
            uses[0, batch, 0] = frozenset(range(span[0], span[1] + 1))
        ways = [(f, l) for f in range(micros) for l in range(f, micros)]
        for worker, (first, last) in enumerate(ways, 1):
            uses[0, batch, worker] = frozenset((first, last))
    return uses


def random_order(actions: Sequence[Action], rng: random.Random) -> list[Action] | None:
    """Lanes in order, waits kept, otherwise any: some lanes tend to run ahead.  None where it gets stuck."""
    lanes: dict[str, list[Action]] = {}
    for action in actions:
        lanes.setdefault(action.lane, []).append(action)
    eager = {lane: rng.random() for lane in lanes}
    begin = min(a.batch for a in actions)
    done: set[Name] = set()
    order: list[Action] = []
    while any(lanes.values()):
        heads = [queue[0] for queue in lanes.values() if queue]
        ready = [a for a in heads if all(w in done or w[1] < begin for w in a.after)]
        if not ready:
            return None
        chosen = max(ready, key=lambda a: eager[a.lane] + 0.5 * rng.random())
        order.append(lanes[chosen.lane].pop(0))
        done.add(chosen.name)
    return order


def execute(order: Sequence[Action], uses: Uses) -> Outcome:
    values: dict[tuple[State, Place], int] = {}

    def get(state: State, place: Place) -> int:
        return values.get((state, place), hash(("start", state, place)))

    read: dict[Name, int] = {}
    for action in order:
        touched = [(effect, place) for effect in action.effects for place in places(effect, action.micro, uses)]
        inputs = {(e.state, p, get(e.state, p)) for e, p in touched if e.kind in ("read", "add")}
        digest = read[action.name] = hash((action.name, frozenset(inputs)))
        new: dict[tuple[State, Place], int] = {}
        for effect, place in touched:
            if effect.kind == "copy":
                assert effect.source is not None
                from_place = place if effect.source[0] in PER_WORKER else (place[0], -1)
                new[effect.state, place] = get(effect.source, from_place)
            elif effect.kind != "read":
                new[effect.state, place] = hash((digest, effect.state, place))
        values.update(new)
    outlive = {at: value for at, value in values.items() if not any(isinstance(part, int) for part in at[0])}
    return read, outlive


def places(effect: Effect, micro: int, uses: Uses) -> list[Place]:
    """Where an effect touches something."""
    if not effect.batches and not effect.without:
        return [(-1, -1)]
    keys = sorted({key for key, _, _ in uses})
    workers = sorted({worker for _, _, worker in uses})
    if effect.state[0] in PER_WORKER:
        return [(k, w) for k in keys for w in workers if _touches(effect, micro, uses, k, [w])]
    return [(k, -1) for k in keys if _touches(effect, micro, uses, k, workers)]


def _touches(effect: Effect, micro: int, uses: Uses, key: int, workers: list[int]) -> bool:
    """Whether one of the workers has the key in the effect's first batch, used in the micro-batch as it says, and any has it in
    the others."""
    everyone = {worker for _, _, worker in uses}
    for batch in effect.batches:
        mine = [
            uses[key, batch, w]
            for w in (workers if batch == effect.batches[0] else everyone)
            if (key, batch, w) in uses
        ]
        if batch == effect.batches[0] and effect.use:
            met = {"first": lambda m: min(m) == micro, "last": lambda m: max(m) == micro, "used": lambda m: micro in m}
            mine = [micros for micros in mine if met[effect.use](micros)]
        if not mine:
            return False
    return not any((key, batch, w) in uses for batch in effect.without for w in everyone)
