"""`check` proves serial and dbp exact, and names the two actions and the rows that break what is not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from executions import execute, random_order, random_uses
from nestpipe.schedule import BUILDERS, EXACT, STALE, Action, Options, build, reference
from nestpipe.schedule.action import Name, act, label
from nestpipe.schedule.check import Proof, Violation, check, examine, happens_before
from nestpipe.schedule.effects import STORE, Effect, rows
from nestpipe.schedule.options import DEFAULT
from nestpipe.schedule.semi_async import with_peeks

Change = Callable[[list[Action]], list[Action]]


def names(*labels: str) -> list[Name]:
    """The other way round than `label`."""
    found = []
    for text in labels:
        stage, _, number = text.partition(" ")
        batch, _, micro = number.partition(".")
        found.append((stage, int(batch), int(micro) if micro else -1))
    return found


def place(actions: list[Action], text: str) -> int:
    return [str(a) for a in actions].index(text)


def changed(actions: list[Action], text: str, **fields: object) -> list[Action]:
    i = place(actions, text)
    return [*actions[:i], replace(actions[i], **fields), *actions[i + 1 :]]


def without_effect(actions: list[Action], text: str, unwanted: Callable[[Effect], bool]) -> list[Action]:
    action = actions[place(actions, text)]
    left = tuple(e for e in action.effects if not unwanted(e))
    assert len(left) < len(action.effects)
    return changed(actions, text, effects=left)


def moved(actions: list[Action], text: str, before: str) -> list[Action]:
    left = [a for a in actions if str(a) != text]
    i = place(left, before)
    return [*left[:i], actions[place(actions, text)], *left[i:]]


def waiting(actions: list[Action], text: str, *waits: str) -> list[Action]:
    return changed(actions, text, waits=tuple(names(*waits)))


def broken(actions: list[Action], batches: int = 4, micros: int = 2) -> Violation:
    found = check(actions, build("serial", batches, micros))
    assert found is not None, "called exact"
    return found


def assert_names(found: Violation, first: str, second: str, batches: tuple[int, ...], what: str) -> None:
    assert (label(found.first), label(found.second)) == (first, second), str(found)
    assert tuple(b for b, _, _ in found.rows.uses) == batches, str(found)
    assert what in found.why and first in str(found) and second in str(found)


@pytest.mark.parametrize("micros", range(1, 5))
@pytest.mark.parametrize("batches", range(1, 7))
@pytest.mark.parametrize("schedule", BUILDERS)
def test_every_schedule_is_proven_exact_or_as_designed(schedule: str, batches: int, micros: int) -> None:
    """Promise: what is stale by design is never called exact, and is proven to be nothing else."""
    actions = build(schedule, batches, micros)
    proof = examine(actions, reference(schedule, batches, micros), schedule in STALE)
    assert isinstance(proof, Proof), str(proof)
    assert proof.exact == (schedule in EXACT or batches == 1) and ("stale by one batch" in str(proof)) != proof.exact
    assert proof.actions == len(actions) and proof.pairs > 0 and proof.reads > 0
    assert proof.classes == (2 + micros * (micros + 1) // 2) ** batches


@pytest.mark.parametrize("schedule", BUILDERS)
def test_a_pipeline_that_starts_anew_is_exact(schedule: str) -> None:
    """From a later step on, as after the end of an epoch, with nothing before it to wait for."""
    lists = ([a for step in range(3, 7) for a in BUILDERS[name](step, 2, 3)] for name in (schedule, "serial"))
    actions, serial = ([a for a in found if a.batch < 7] for found in lists)
    assert {a.batch for a in actions} == {3, 4, 5, 6}
    if schedule in STALE:
        assert check(actions, with_peeks(serial), stale=True) is None
    else:
        assert check(actions, serial) is None


def test_shared_rows_left_out_of_sync() -> None:
    """Rows of t-1 and t are stale without the sync."""
    actions = without_effect(build("dbp", 4, 2), "sync 1", lambda e: e.kind == "copy")
    assert_names(broken(actions), "update 0", "compute 1.0", (0, 1), "window 1")


def test_optimizer_state_left_out_of_sync() -> None:
    """Values alone are not enough: the optimizer's state is rows, too."""
    actions = without_effect(build("dbp", 4, 2), "sync 1", lambda e: e.state == rows(1)[1])
    assert_names(broken(actions), "update 0", "update 1", (0, 1), "rows 1 state")


def test_writeback_of_t_minus_2_after_retrieve_of_t() -> None:
    """A key of t-2 and t but not t-1: the row that neither the store nor the sync brings in time."""
    actions = moved(waiting(build("dbp", 4, 2), "retrieve 2", "route 2"), "retrieve 2", before="writeback 0")
    assert_names(broken(actions), "retrieve 2", "writeback 0", (0, 2), "store values")
    ordered = waiting(actions, "writeback 0", "retrieve 2", "update 0", "agree 0")
    assert_names(broken(ordered), "update 0", "compute 2.0", (0, 2), "window 2")
    assert "rows in batches 0 and 2 but not 1" in str(broken(ordered))


def test_early_retrieve_breaks_without_any_part_of_it() -> None:
    """Rows of t-2 come from its buffer: what it may leave out, copy, and must wait for."""
    options = replace(DEFAULT, early_retrieve=True)
    serial = build("serial", 5, 2, options)
    actions = build("nested", 5, 2, options)
    assert check(actions, serial) is None

    def found(list_of: list[Action]) -> Violation:
        violation = check(list_of, serial)
        assert violation is not None, "called exact"
        return violation

    not_copied = without_effect(actions, "retrieve 3", lambda e: e.source in rows(1))
    assert found(not_copied).rows.uses[0][0] == 1
    not_updated = waiting(actions, "retrieve 3", "route 3", "writeback 0")
    assert_names(found(not_updated), "sync 1", "retrieve 3", (0, 1, 3), "rows 1 values")
    not_stored = waiting(actions, "retrieve 3", "route 3", "update 1")
    assert_names(found(not_stored), "writeback 0", "retrieve 3", (0, 3), "store values")
    read_too_early = changed(
        actions,
        "retrieve 3",
        effects=tuple(replace(e, without=(2,)) if e.kind == "copy" else e for e in act("retrieve", 3).effects),
    )
    assert_names(found(read_too_early), "writeback 1", "retrieve 3", (1, 3), "store values")


def test_a_sweep_before_writeback_of_t_minus_2() -> None:
    """A sweep looks at all rows: those that only t-2 touches must be in the store before it, too."""
    options = replace(DEFAULT, evicts=True)
    actions = moved(waiting(build("dbp", 4, 2, options), "retrieve 2", "route 2"), "retrieve 2", before="writeback 0")
    serial = build("serial", 4, 2, options)
    found = check(actions, serial)
    assert found is not None and "retrieve 2" in str(found) and "writeback 0" in str(found), (
        "they may run at the same time"
    )
    found = check(waiting(actions, "writeback 0", "retrieve 2", "update 0", "agree 0"), serial)
    assert found is not None
    assert_names(found, "update 0", "retrieve 2", (0,), "store state")


def test_a_sweep_beside_early_retrieve() -> None:
    """Rows that t-2 has not written back yet are nowhere to be seen by a sweep: the two do not go together."""
    options = replace(DEFAULT, early_retrieve=True, evicts=True)
    assert check(build("nested", 5, 2, options), build("serial", 5, 2, options)) is not None


def test_a_sweep_that_looks_at_the_rows_of_the_batch_before() -> None:
    """They are in the store under serial, and not yet under dbp."""
    options = replace(DEFAULT, evicts=True)

    def curious(actions: list[Action]) -> list[Action]:
        retrieve = actions[place(actions, "retrieve 2")]
        effects = tuple(replace(e, without=()) if e.kind == "read" and e.without else e for e in retrieve.effects)
        return changed(actions, "retrieve 2", effects=effects)

    found = check(curious(build("dbp", 4, 2, options)), curious(build("serial", 4, 2, options)))
    assert found is not None and 1 in [batch for batch, _, _ in found.rows.uses] and "store state" in str(found)
    assert check(curious(build("fwp", 4, 2, options)), curious(build("serial", 4, 2, options))) is None


def test_embed_from_the_store() -> None:
    """The store has what the batch before wrote only once that is written back."""
    actions = build("dbp", 4, 2)
    embed = actions[place(actions, "embed 1.0")]
    effects = tuple(replace(e, source=STORE[0]) if e.kind == "copy" else e for e in embed.effects)
    assert_names(
        broken(changed(actions, "embed 1.0", effects=effects)), "writeback 0", "embed 1.0", (0, 1), "store values"
    )


def test_embed_from_the_rows_of_the_batch_before() -> None:
    """A row that only this batch uses is not in the other buffer: what was there at the start is not the store's start."""
    actions = build("dbp", 4, 2)
    embed = actions[place(actions, "embed 1.0")]
    effects = tuple(replace(e, source=rows(0)[0]) if e.kind == "copy" else e for e in embed.effects)
    found = broken(changed(actions, "embed 1.0", effects=effects))
    assert_names(found, "compute 1.0", "compute 1.0", (1,), "store values was at the start")


def test_update_before_the_last_accumulate() -> None:
    """Applied before all gradients are in."""
    actions = waiting(build("dbp", 4, 2), "update 0", "accumulate 0.0")
    actions = moved(actions, "update 0", before="accumulate 0.1")
    assert_names(broken(actions), "embed 0.1", "update 0", (0,), "rows 0 values")


@pytest.mark.parametrize("schedule", ["dbp", "nested"])
def test_a_row_dispatched_before_the_last_batch_has_updated_it(schedule: str) -> None:
    """Early dispatch is only right for rows that the batch before does not touch."""
    found = broken(waiting(build(schedule, 4, 2), "embed 1.0", "retrieve 1"))
    assert label(found.second) == "embed 1.0" and label(found.first) in ("update 0", "sync 1"), str(found)
    assert [b for b, _, _ in found.rows.uses] == [0, 1], str(found)


@pytest.mark.parametrize("schedule", ["fwp", "nested"])
def test_a_gradient_sent_before_its_last_use(schedule: str) -> None:
    found = broken(waiting(build(schedule, 4, 2), "grad 1.1", "compute 1.0"))
    assert {label(found.first), label(found.second)} == {"compute 1.1", "grad 1.1"}, str(found)
    assert "window grads 1" in found.why


@pytest.mark.parametrize("schedule", ["dbp", "nested"])
@pytest.mark.parametrize("batch", [0, 3])
def test_rows_left_out_that_nobody_brings(schedule: str, batch: int) -> None:
    """`sync` brings rows of the batch before; those of any other batch must be retrieved."""
    actions = build(schedule, 4, 2)
    retrieve = actions[place(actions, "retrieve 2")]
    effects = tuple(replace(e, without=(1, batch)) if e.kind == "copy" else e for e in retrieve.effects)
    found = broken(changed(actions, "retrieve 2", effects=effects))
    assert {batch, 2} <= {b for b, _, _ in found.rows.uses} <= {0, 2, 3} and "compute 2.0 must read" in found.why, str(
        found
    )


def test_agreed_before_the_last_accumulate() -> None:
    """The norm of gradients that are not complete."""
    actions = waiting(build("dbp", 4, 2), "agree 0", "reduce 0.0")
    assert_names(broken(actions), "accumulate 0.1", "agree 0", (0,), "grads 0")


def test_update_that_does_not_wait_for_the_verdict() -> None:
    """Where gradients are clipped: after the last accumulate, but before all workers know by how much."""
    options = replace(DEFAULT, clips=True)
    actions = waiting(build("dbp", 4, 2, options), "update 0", "accumulate 0.1")
    found = check(actions, build("serial", 4, 2, options))
    assert found is not None
    assert_names(found, "agree 0", "update 0", (), "outcome 0")


def test_a_batch_that_was_not_agreed_on_reaches_the_tables() -> None:
    """Rows may be updated early, but not written back."""
    actions = waiting(build("dbp", 4, 2), "writeback 0", "update 0")
    assert_names(broken(actions), "agree 0", "writeback 0", (), "outcome 0")


def test_a_bucket_that_does_not_wait_for_the_backward_pass() -> None:
    """Dense gradients summed over the workers while they are still being added to."""
    options = replace(DEFAULT, defer_weight_grads=False)
    actions = changed(build("nested", 4, 2, options), "reduce 1.0", within=("compute", 1, 0))
    found = check(actions, build("serial", 4, 2, options))
    assert found is not None
    assert_names(found, "compute 1.1", "reduce 1.0", (), "bucket 0")


def test_a_bucket_that_does_not_wait_for_its_weights() -> None:
    """The backward passes have left part of it undone."""
    actions = changed(build("nested", 4, 2), "reduce 1.0", within=("compute", 1, 1))
    assert_names(broken(actions), "weight_grad 1", "reduce 1.0", (), "bucket 0")


def test_weights_made_before_the_last_backward_pass() -> None:
    actions = moved(build("nested", 4, 2), "weight_grad 1", before="compute 1.1")
    assert_names(broken(actions), "compute 1.1", "reduce 1.0", (), "bucket 0")
    actions = waiting(changed(actions, "reduce 1.0", within=None), "reduce 1.0", "compute 1.1")
    assert_names(broken(actions), "compute 1.1", "weight_grad 1", (), "deferred 1")


def test_who_waits_for_a_bucket_has_not_waited_for_the_whole_pass() -> None:
    """A bucket is summed inside the backward pass; row gradients may still be missing when its sum is there."""
    options = replace(DEFAULT, buckets=3, defer_weight_grads=False)
    actions = build("nested", 3, 2, options)
    actions = waiting(actions, "grad 1.1", "reduce 1.2")
    for text in ("grad 1.1", "accumulate 1.1"):
        actions = moved(actions, text, before="agree 1")
    found = check(actions, build("serial", 3, 2, options))
    assert found is not None
    assert_names(found, "compute 1.1", "grad 1.1", (1,), "window grads 1")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", BUILDERS)
@pytest.mark.parametrize("look_ahead, buckets", [(0, 1), (1, 3), (9, 2)])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_every_option_is_proven_exact(schedule: str, look_ahead: int, buckets: int, clips: bool, early: bool) -> None:
    """Whatever a builder may vary gives what `serial` gives with the same options."""
    for early_update, defer_weight_grads, early_prepare, retrieve in itertools.product((False, True), repeat=4):
        options = Options(
            buckets, clips, look_ahead, early, early_update, defer_weight_grads, early_prepare, retrieve, evicts=False
        )
        for replicates in (False, True):
            options = replace(options, evicts=early and not retrieve, replicates=replicates)
            assert check(build(schedule, 5, 3, options), reference(schedule, 5, 3, options), schedule in STALE) is None


GROUPS = replace(DEFAULT, replicates=True)


def broken_in_groups(actions: list[Action]) -> Violation:
    found = check(actions, build("serial", 4, 2, GROUPS))
    assert found is not None, "called exact"
    return found


def test_replicate_is_in_lists_of_groups_only() -> None:
    """Promise: with one group a list is what it was before there were groups."""
    for schedule in BUILDERS:
        plain, grouped = build(schedule, 4, 2), build(schedule, 4, 2, GROUPS)
        assert not any(a.stage == "replicate" for a in plain)
        assert [str(a) for a in grouped if a.stage != "replicate"] == [str(a) for a in plain]
        assert sum(a.stage == "replicate" for a in grouped) == 8


@pytest.mark.parametrize("schedule", ["dbp", "fwp", "nested"])
def test_update_before_replicate(schedule: str) -> None:
    """Promise: gradients of other groups must be in before rows are updated."""
    actions = waiting(build(schedule, 4, 2, GROUPS), "update 1", "accumulate 1.1")
    assert_names(broken_in_groups(actions), "replicate 1.0", "update 1", (1,), "grads 1")
    ordered = waiting(actions, "replicate 1.1", "update 1", "accumulate 1.1")
    ordered = moved(ordered, "update 1", before="replicate 1.1")
    assert "update 1" in str(broken_in_groups(ordered)), "before it, in an order that is no race"


def test_replicate_before_accumulate() -> None:
    """Promise: what a group sends must be all of its own gradients."""
    actions = waiting(build("nested", 4, 2, GROUPS), "replicate 1.0", "retrieve 1")
    assert_names(broken_in_groups(actions), "accumulate 1.0", "replicate 1.0", (1,), "group grads 1")


def test_a_replicate_left_out() -> None:
    """Promise: no micro-batch is left out."""
    actions = [a for a in build("nested", 4, 2, GROUPS) if str(a) != "replicate 1.0"]
    assert "replicate 1.0" in str(broken_in_groups(actions))


def test_norms_before_replicate() -> None:
    """Promise: workers agree on gradients that are summed over groups."""
    actions = build("nested", 4, 2, GROUPS)
    waits = tuple(("accumulate", 1, 1) if w[0] == "replicate" else w for w in actions[place(actions, "agree 1")].waits)
    assert_names(
        broken_in_groups(changed(actions, "agree 1", waits=waits)), "replicate 1.0", "agree 1", (1,), "grads 1"
    )


def test_accumulate_order_swapped() -> None:
    """Two workers may use a row last in different micro-batches; sums in another order round differently."""
    actions = waiting(build("dbp", 4, 2), "embed 0.1", "grad 0.0")
    actions = waiting(actions, "reduce 0.0", "accumulate 0.0", "accumulate 0.1")
    actions = moved(actions, "accumulate 0.1", before="reduce 0.0")
    assert check(actions, build("serial", 4, 2)) is None
    actions = moved(actions, "accumulate 0.0", before="reduce 0.0")
    assert_names(broken(actions), "accumulate 0.0", "accumulate 0.1", (0,), "grads 0")


def test_two_lanes_made_concurrent() -> None:
    """`sync` copies from a buffer that `update` is still to write."""
    actions = waiting(build("dbp", 4, 2), "sync 1", "retrieve 1")
    actions = moved(actions, "sync 1", before="update 0")
    assert_names(broken(actions), "update 0", "compute 1.0", (0, 1), "window 1")


def test_embed_of_the_next_micro_batch_may_overtake_compute() -> None:
    """The frozen window: rows first used in 1 do not disturb micro-batch 0, so this wait is not about exactness."""
    actions = waiting(build("dbp", 4, 2), "embed 1.1", "sync 1")
    assert check(moved(actions, "embed 1.1", before="compute 1.0"), build("serial", 4, 2)) is None


def test_compute_must_wait_for_its_rows() -> None:
    """Rows first used in this micro-batch, or in an earlier one: which of them is said."""
    found = broken(waiting(build("dbp", 2, 2), "compute 1.0", "sync 1"), 2)
    assert_names(found, "embed 1.0", "compute 1.0", (1,), "window 1")
    actions = waiting(build("dbp", 2, 2), "embed 1.1", "sync 1")
    actions = waiting(moved(actions, "compute 1.1", before="compute 1.0"), "compute 1.1", "sync 1")
    found = broken(moved(actions, "grad 1.1", before="embed 1.1"), 2)
    assert_names(found, "embed 1.0", "compute 1.1", (1,), "window 1")
    assert "used in micro-batch 1.0 to 1.1" in str(found)


def test_a_missing_action_is_named() -> None:
    for text in ("sync 1", "writeback 3", "embed 2.1"):
        actions = [a for a in build("dbp", 4, 2) if str(a) != text]
        found = broken([replace(a, waits=tuple(w for w in a.waits if label(w) != text)) for a in actions])
        assert label(found.first) == text and "is not in the list" in found.why


def test_a_doubled_action_is_named() -> None:
    """Also one that would do no harm: whoever waits for it could not say which."""
    for text in ("compute 1.0", "retrieve 1"):
        actions = build("dbp", 4, 2)
        i = place(actions, text)
        found = broken([*actions[:i], actions[i], *actions[i:]])
        assert label(found.first) == text and "2 times" in found.why


def test_an_unknown_action_is_named() -> None:
    found = broken(build("dbp", 5, 2))
    assert label(found.first) == "load 4" and "not in the reference" in found.why


def test_waits_in_a_circle_are_named() -> None:
    actions = build("dbp", 4, 2)
    found = broken(waiting(actions, "retrieve 1", "route 1", "sync 1"))
    assert (label(found.first), label(found.second)) == ("retrieve 1", "sync 1") and "issued later" in found.why
    found = broken(waiting(actions, "retrieve 1", "retrieve 1"))
    assert label(found.first) == "retrieve 1" and "itself" in found.why
    found = broken(waiting(actions, "retrieve 1", "route 9"))
    assert (label(found.first), label(found.second)) == ("route 9", "retrieve 1")


def test_the_end_counts() -> None:
    """What the last batch leaves in the tables is read by nobody in the list, and still must be right."""
    actions = without_effect(build("dbp", 4, 2), "writeback 3", lambda e: e.state == STORE[1])
    found = broken(actions)
    assert label(found.first) == "update 3" and found.rows.uses[-1][0] == 3 and "at the end store state" in found.why


def test_the_same_function_of_the_same_things() -> None:
    """An action that reads less, or more, than in serial is another function."""
    actions = without_effect(build("dbp", 2, 1), "compute 1.0", lambda e: e.state == ("dense",))
    assert "does not read dense" in str(broken(actions, 2, 1))
    more = build("dbp", 2, 1)
    load = more[0]
    more = changed(more, "load 0", effects=(*load.effects, Effect("read", ("dense",))))
    assert "does not read dense" in str(broken(more, 2, 1))


def test_effects_that_check_cannot_follow_are_refused() -> None:
    actions = build("serial", 1, 2)
    effects = (Effect("write", ("grads", 0), batches=(0,), use="last"),)
    with pytest.raises(ValueError, match=r"grad 0\.1: check cannot follow a write of grads 0 for rows last in it"):
        check(changed(actions, "grad 0.1", effects=effects), actions)


@pytest.mark.slow
@pytest.mark.parametrize("micros", [1, 2, 3])
@pytest.mark.parametrize("schedule", BUILDERS)
@pytest.mark.parametrize("early_retrieve", [False, True])
def test_every_wait_is_needed_or_implied(schedule: str, micros: int, early_retrieve: bool) -> None:
    """Each wait dropped alone is caught, or changes nothing in what comes before what, or is known not to be about exactness."""
    options = replace(DEFAULT, early_retrieve=early_retrieve)
    serial, actions = reference(schedule, 4, micros, options), build(schedule, 4, micros, options)
    truth = actions if schedule in STALE else serial
    order, rng = happens_before(actions), random.Random(0)
    caught, implied, free = set(), set(), set()
    for i, action in enumerate(actions):
        for wait in action.waits:
            less = replace(action, waits=tuple(w for w in action.waits if w != wait))
            fewer = [*actions[:i], less, *actions[i + 1 :]]
            pair = f"{action.stage} for {wait[0]}"
            if check(fewer, serial, schedule in STALE) is not None:
                caught.add(pair)
            elif happens_before(fewer) == order:
                implied.add(pair)
            else:
                free.add(pair)
                uses, again = random_uses(rng, 4, micros), random_order(fewer, rng)
                assert again is not None and execute(again, uses) == execute(truth, uses)
    assert {"sync for retrieve", "compute for embed", "accumulate for grad", "writeback for update"} <= caught
    # Later batches could be prepared before this one has computed where there is dbp; rows of the next micro-batch could travel
    # earlier where there is no fwp.
    harmless = set() if schedule in ("serial", "fwp") else {"route for weight_grad"}
    if schedule in ("dbp", "nested", "semi_async") and not early_retrieve:
        harmless.add("retrieve for sync")  # a third buffer would do, but there are to be two
    if schedule in ("serial", "dbp") and micros > 1:
        harmless.add("embed for accumulate")
    assert free == harmless
    if schedule == "dbp":
        assert implied == {
            "compute for move",  # through route, retrieve and sync
            "agree for reduce",  # the same lane, as the three below
            "sync for update",
            "update for accumulate",
        }
        assert ("retrieve for update" in caught) == early_retrieve and "retrieve for writeback" in caught


def test_rows_in_only_one_of_two_batches_are_followed_further_back() -> None:
    """Where an effect needs both batches, rows in the first alone, and rows in the second alone, are classes of their own."""
    for alone in (0, 1):
        both = Action("load", 1, -1, (), (Effect("write", STORE[0], batches=(0, 1)),))
        one = Action("load", 0, -1, (), (Effect("write", STORE[0], batches=(alone,)),))
        assert check([one, both], [one, both]) is None
        found = check([replace(one, effects=()), both], [one, both])
        assert found is not None and [batch for batch, _, _ in found.rows.uses] == [alone]


# Stale by design


def not_as_designed(actions: list[Action], options: Options = DEFAULT) -> Violation:
    found = check(actions, reference("semi_async", 4, 2, options), stale=True)
    assert found is not None, "called as designed"
    return found


def test_stale_rows_are_not_exact() -> None:
    """Promise: without its label, `semi_async` is refused like any other list that reads old rows."""
    found = check(build("semi_async", 4, 2), reference("semi_async", 4, 2))
    assert found is not None
    assert_names(found, "update 0", "compute 1.0", (0, 1), "window 1")


def test_rows_that_are_two_batches_old() -> None:
    """Promise: the bound is never exceeded: rows peeked before the batch before has its own."""
    options = replace(DEFAULT, early_retrieve=False)
    actions = build("semi_async", 4, 2, options)
    early = waiting(moved(actions, "peek 2", before="sync 1"), "peek 2", "retrieve 2")
    found = not_as_designed(early, options)
    assert {label(found.first), label(found.second)} & {"peek 2", "sync 1", "compute 2.0"}, str(found)
    older = actions[place(actions, "peek 2")]
    source = tuple(replace(e, source=rows(0)[0]) if e.kind == "copy" else e for e in older.effects)
    found = not_as_designed(changed(actions, "peek 2", effects=source), options)
    assert label(found.second) == "compute 2.0" and "window 2" in found.why, str(found)


def test_rows_that_are_fresh_by_chance() -> None:
    """Promise: never a mixture: what the batch before has updated already is not what is to be read."""
    actions = build("semi_async", 4, 2)
    late = moved(actions, "peek 1", before="sync 1")
    for micro in (0, 1):
        late = moved(late, f"embed 1.{micro}", before="sync 1")
    assert_names(not_as_designed(late), "update 0", "compute 1.0", (0, 1), "window 1")
    embed = actions[place(actions, "embed 1.1")]
    from_rows = changed(actions, "embed 1.1", effects=act("embed", 1, 1).effects)
    assert len(embed.effects) == 3 and {label(not_as_designed(from_rows).second)} <= {"sync 1", "compute 1.1"}


@pytest.mark.parametrize("part", [0, 1])
def test_a_lost_update(part: int) -> None:
    """Promise: the update of a batch is applied on top of the one before, values and optimizer state."""
    actions = without_effect(
        build("semi_async", 4, 2), "sync 1", lambda e: e.kind == "copy" and e.state == rows(1)[part]
    )
    found = not_as_designed(actions)
    assert_names(found, "update 0", "update 1", (0, 1), f"rows 1 {('values', 'state')[part]}")


def test_an_update_that_does_not_wait_for_the_peek() -> None:
    """Promise: rows are peeked before they change."""
    actions = build("semi_async", 4, 2)
    found = not_as_designed(waiting(moved(actions, "update 0", before="peek 1"), "update 0", "accumulate 0.0"))
    assert "update 0" in str(found)
