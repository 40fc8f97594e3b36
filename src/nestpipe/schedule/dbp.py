"""Dual-Buffer Pipelining: when batch t computes, t+1 is being retrieved, and t+2 is routed, t+3 moved and t+4 loaded already.

Two buffers hold rows: that of t, being trained, and that of t+1, being filled.  Rows that both batches touch would be read too
early, as t is still changing them: `retrieve` leaves them out, and `sync` copies them from one buffer to the other, values and
optimizer state.  Rows that t-1 changed and t does not touch are in the store in time, because `writeback(t-1)` comes before
`retrieve(t+1)`.

So a store whose disk takes long is asked for one thing after the other.  With `early_retrieve` both happen at once: rows of t-1
are final when `update(t-1)` is over, and `retrieve(t+1)` copies them from its buffer, a third one, and the others from the
store.

Where replicas are averaged after t (`averaging`), `retrieve(t+1)` and `retrieve(t+2)` wait for that, and t+1 copies nothing of t.
"""

from __future__ import annotations

from dataclasses import replace

from nestpipe.schedule.action import Action, Name, act
from nestpipe.schedule.averaging import first_of_run, opens_late
from nestpipe.schedule.boundary import boundary, boundary_begins, summed
from nestpipe.schedule.effects import copied_rows, shared_rows
from nestpipe.schedule.options import DEFAULT, Options

AHEAD = {"load": 4, "move": 3, "route": 2, "retrieve": 1}
"""How many batches each early stage is ahead of the batch that computes."""


def dbp(step: int, micro_batches: int, start: int = 0, options: Options = DEFAULT) -> list[Action]:
    """The actions that step `step` issues: stage five of batch `step`, and at its end the early stages of later batches."""
    return [*(filling(start, options) if step == start else []), *stage_five(step, micro_batches, start, options)]


def filling(start: int, options: Options) -> list[Action]:
    """Stages 1 to 4 of the first batches, with which an empty pipeline begins."""
    return [
        _early(stage, batch, start, options)
        for stage, ahead in AHEAD.items()
        for batch in range(start, start + ahead + 1)
        if not (stage == "retrieve" and opens_late(batch, start, options))
    ]


def preparing(step: int, start: int, options: Options, after: Name) -> list[Action]:
    """Stages 1 to 4 for the step after `step`, without rows that must be retrieved later (`opening`)."""
    return [
        _early(stage, step + 1 + ahead, start, options, (after,))
        for stage, ahead in AHEAD.items()
        if not (stage == "retrieve" and opens_late(step + 1 + ahead, start, options))
    ]


def _early(stage: str, batch: int, start: int, options: Options, after: tuple[Name, ...] = ()) -> Action:
    waits: list[Name] = [*after] if stage != "retrieve" else []
    first = first_of_run(batch, start, options)
    if stage == "move":
        waits.append(("load", batch, -1))
    elif stage == "route":
        waits.append(("move", batch, -1))
    elif stage == "retrieve":
        waits.append(("route", batch, -1))
        # Rows that the batch before does not touch must be in the store, or in a buffer.  And a buffer must be free: who writes
        # the oldest one back and who copies from it have to be done.
        if batch >= first + 2:
            waits.append(("update", batch - 2, -1) if options.early_retrieve else ("sync", batch - 1, -1))
        stored = batch - 3 if options.early_retrieve else batch - 2
        if stored >= first:
            waits.append(("writeback", stored, -1))
        if start < first >= batch - 1:
            waits.append(("average", first - 1, -1))
    action = act(stage, batch, waits=tuple(waits), options=options)
    return unshared(action, first, options) if stage == "retrieve" and batch > first else action


def unshared(retrieve: Action, start: int, options: Options) -> Action:
    """Rows that the batch before touches too are left out: `sync` brings them.  Others that the one before it touches may come
    from its buffer.
    """
    batch = retrieve.batch
    from_buffer = options.early_retrieve and batch >= start + 2
    elsewhere = (batch - 1, batch - 2) if from_buffer else (batch - 1,)
    effects = [replace(e, without=elsewhere) if e.kind == "copy" else e for e in retrieve.effects]
    if from_buffer:
        effects += copied_rows(batch - 2, batch, without=(batch - 1,))
    return replace(retrieve, effects=tuple(effects))


def sync(step: int, start: int, options: Options) -> Action:
    """Waits for this batch's rows and for the update of the last one's, then copies what both touch."""
    waits: list[Name] = [("retrieve", step, -1)]
    if step == first_of_run(step, start, options):
        return act("sync", step, waits=tuple(waits), options=options)
    action = act("sync", step, waits=(*waits, ("update", step - 1, -1)), options=options)
    return replace(action, effects=(*action.effects, *shared_rows(step)))


def stage_five(step: int, micro_batches: int, start: int, options: Options) -> list[Action]:
    """From `sync` to `writeback` of one batch, its micro-batches one after another; `sync` and first rows of the next one."""
    t = step
    actions = opening(t, start, options) if t == start else []
    for m in range(micro_batches):
        if m:
            actions.append(act("embed", t, m, (("accumulate", t, m - 1),), options))
        actions.append(act("compute", t, m, (("embed", t, m), ("move", t, -1)), options))
        actions.append(act("grad", t, m, (("compute", t, m),), options))
        actions += summed(t, m, options)
    return [*actions, *boundary(t, micro_batches, options, meanwhile(t, micro_batches, start, options))]


def opening(batch: int, start: int, options: Options) -> list[Action]:
    """What of a batch may begin before the one before it has taken its dense step."""
    late = [_early("retrieve", batch, start, options)] if opens_late(batch, start, options) else []
    return [*late, sync(batch, start, options), act("embed", batch, 0, (("sync", batch, -1),), options)]


def again(batch: int, start: int, options: Options) -> list[Action]:
    """After tables changed between two steps: what was done with rows of `batch`, the next one, and of the one behind it."""
    later = [] if opens_late(batch + 1, start, options) else [_early("retrieve", batch + 1, batch, options)]
    return [_early("retrieve", batch, batch, options), *opening(batch, batch, options), *later]


def meanwhile(batch: int, micro_batches: int, start: int, options: Options) -> list[Action]:
    """What of later batches is done while the dense gradients of this one are summed and stepped with."""
    after = boundary_begins(batch, micro_batches, options) if options.early_prepare else ("embed", batch + 1, 0)
    return [*opening(batch + 1, start, options), *preparing(batch, start, options, after)]
