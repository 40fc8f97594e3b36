"""`check` against the truth: lists changed at random and executed on numbers, in random orders, with random keys."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from executions import execute, random_order, random_uses, uses_of
from nestpipe.schedule import BUILDERS, STALE, Action, build
from nestpipe.schedule import reference as reference_of
from nestpipe.schedule.check import Violation, check, happens_before
from nestpipe.schedule.effects import STORE, Effect, rows
from nestpipe.schedule.options import DEFAULT

Actions = list[Action]
Change = Callable[[Actions, random.Random], Actions]


def drop_a_wait(actions: Actions, rng: random.Random) -> Actions:
    i = rng.choice([i for i, a in enumerate(actions) if a.waits] or [0])
    waits = list(actions[i].waits)
    if waits:
        waits.pop(rng.randrange(len(waits)))
    return [*actions[:i], replace(actions[i], waits=tuple(waits)), *actions[i + 1 :]]


def wait_for_another(actions: Actions, rng: random.Random) -> Actions:
    """One wait becomes one for something near it in the list."""
    i = rng.randrange(1, len(actions))
    other = actions[max(0, i - rng.randint(1, 12))].name
    waits = (*actions[i].waits[1:], other)
    return [*actions[:i], replace(actions[i], waits=waits), *actions[i + 1 :]]


def move_an_action(actions: Actions, rng: random.Random) -> Actions:
    """Earlier in the list, and what it waited for in between is waited for no more."""
    i = rng.randrange(1, len(actions))
    j = max(0, i - rng.randint(1, 6))
    passed = {a.name for a in actions[j:i]}
    early = replace(actions[i], waits=tuple(w for w in actions[i].waits if w not in passed))
    return [*actions[:j], early, *actions[j:i], *actions[i + 1 :]]


def move_for_free(actions: Actions, rng: random.Random) -> Actions:
    """Earlier in the list, but behind all that it waits for."""
    i = rng.randrange(1, len(actions))
    names = [a.name for a in actions]
    earliest = 1 + max((names.index(w) for w in actions[i].after if w in names), default=-1)
    j = max(min(earliest, i), i - rng.randint(1, 6))
    return [*actions[:j], actions[i], *actions[j:i], *actions[i + 1 :]]


def let_embed_run_ahead(actions: Actions, rng: random.Random) -> Actions:
    """Rows of later micro-batches travel while an earlier one computes: exact, unless something else is wrong."""
    return [
        replace(a, waits=(("sync", a.batch, -1),)) if a.stage == "embed" and rng.random() < 0.8 else a for a in actions
    ]


def drop_a_copy(actions: Actions, rng: random.Random) -> Actions:
    return change_a_copy(actions, rng, lambda action, effect: None)


def copy_from_elsewhere(actions: Actions, rng: random.Random) -> Actions:
    sources = (STORE[0], STORE[1], *rows(0), *rows(1))
    return change_a_copy(actions, rng, lambda action, effect: replace(effect, source=rng.choice(sources)))


def copy_other_rows(actions: Actions, rng: random.Random) -> Actions:
    """Rows of one batch more, or less."""

    def change(action: Action, effect: Effect) -> Effect:
        batches = effect.batches[:-1] if len(effect.batches) > 1 else (*effect.batches, max(0, action.batch - 1))
        return replace(effect, batches=batches)

    return change_a_copy(actions, rng, change)


def change_a_copy(actions: Actions, rng: random.Random, change: Callable[[Action, Effect], Effect | None]) -> Actions:
    copying = [i for i, a in enumerate(actions) if any(e.kind == "copy" and e.state[0] != "arrived" for e in a.effects)]
    i = rng.choice(copying)
    effects = list(actions[i].effects)
    at = rng.choice([n for n, e in enumerate(effects) if e.kind == "copy"])
    changed = change(actions[i], effects[at])
    effects[at : at + 1] = [changed] if changed else []
    return [*actions[:i], replace(actions[i], effects=tuple(effects)), *actions[i + 1 :]]


ORDER: list[Change] = [drop_a_wait, wait_for_another, move_an_action, move_for_free, let_embed_run_ahead]
EFFECTS: list[Change] = [drop_a_copy, copy_from_elsewhere, copy_other_rows]

quick = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
schedules, sizes, seeds = (
    st.sampled_from(sorted(BUILDERS)),
    st.tuples(st.integers(1, 4), st.integers(1, 3)),
    st.integers(),
)


def some_of(changes: list[Change]) -> st.SearchStrategy[list[Change]]:
    return st.lists(st.sampled_from(changes), min_size=1, max_size=3)


@pytest.mark.slow
@quick
@given(schedules, sizes, some_of([*ORDER, *ORDER, *EFFECTS]), seeds, st.booleans(), st.booleans())
def test_what_is_called_exact_always_runs_like_serial(
    schedule: str, size: tuple[int, int], changes: list[Change], seed: int, evicts: bool, replicates: bool
) -> None:
    """And so no list that can differ from serial is ever called exact."""
    rng = random.Random(seed)
    options = replace(DEFAULT, evicts=evicts, replicates=replicates)
    actions, reference = build(schedule, *size, options), reference_of(schedule, *size, options)
    truth = actions if schedule in STALE else reference  # what is stale by design has its own meaning
    for change in changes:
        actions = change(actions, rng)
    found = check(actions, reference, schedule in STALE)
    event(
        "not exact" if found else "exact, as it was" if actions == build(schedule, *size, options) else "exact, changed"
    )
    if found is None:
        for _ in range(3):
            uses, order = random_uses(rng, *size), random_order(actions, rng)
            assert order is not None, "it gets stuck"
            assert execute(order, uses) == execute(truth, uses)


@pytest.mark.slow
@quick
@given(schedules, sizes, some_of(ORDER), seeds, st.booleans(), st.booleans())
def test_what_is_called_not_exact_can_differ_from_serial(
    schedule: str, size: tuple[int, int], changes: list[Change], seed: int, evicts: bool, replicates: bool
) -> None:
    """No false alarm: with the rows that it names there is an order in which somebody reads something else.

    Of changed effects this is not asked: a race is refused even where what it leaves is overwritten before anybody reads it.
    """
    rng = random.Random(seed)
    options = replace(DEFAULT, evicts=evicts, replicates=replicates)
    actions, reference = build(schedule, *size, options), reference_of(schedule, *size, options)
    truth = actions if schedule in STALE else reference  # what is stale by design has its own meaning
    for change in changes:
        actions = change(actions, rng)
    found, before = check(actions, reference, schedule in STALE), happens_before(actions)
    if found is None or isinstance(before, Violation):
        return
    second = [a.name for a in actions].index(found.second)
    ahead = [i for i in range(len(actions)) if before[second] >> i & 1]
    early = [*ahead, second, *(i for i in range(len(actions)) if i != second and i not in ahead)]
    uses = uses_of(found, size[1])
    expected = execute(truth, uses)
    runs = [execute(actions, uses), execute([actions[i] for i in early], uses)]
    event("the list itself differs" if runs[0] != expected else "a race")
    assert any(run != expected for run in runs), str(found)
