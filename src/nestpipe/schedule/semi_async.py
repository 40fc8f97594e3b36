"""Semi-asynchronous: `nested`, but rows of the next batch leave before this one has updated them.  Stale by one batch, by design.

What batch t+1 computes with, of the rows that t touches too, is the version before `update(t)`: all of them, in all of its
micro-batches, on every machine.  `peek(t+1)` copies these values from t's buffer, after `sync(t)` and before `update(t)`, and
`embed(t+1)` sends the copies.  So it need not wait for the boundary, and runs `look_ahead` micro-batches ahead of `compute`
across it.

No update is lost.  `peek` copies beside the rows of t+1, not over them.  What `update(t+1)` starts from is what `update(t)` left,
values and optimizer state, brought by `sync(t+1)` as in `dbp`.

Rows of t+1 leave while t computes, so they have to be retrieved while t-1 does, before `update(t-1)`.  With `early_retrieve` they
are, into a fourth buffer: rows that t-1 touches and t does not come from its buffer, too, in `peek(t+1)`.  Where rows are evicted
this cannot be, because a sweep has to see what t-1 left: there `retrieve` waits as in `dbp`.

The first batch of a pipeline that was empty has nothing before it, and reads what `serial` reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nestpipe.schedule.action import Action, Name, act
from nestpipe.schedule.boundary import boundary_begins
from nestpipe.schedule.dbp import filling, preparing, sync
from nestpipe.schedule.effects import copied_rows, peeked, rows, sent_rows
from nestpipe.schedule.fwp import window
from nestpipe.schedule.options import DEFAULT, Options

RETRIEVE_AHEAD = 2
"""With `early_retrieve`: how many batches `retrieve` is ahead of the one that computes."""


def semi_async(
    step: int, micro_batches: int, start: int = 0, options: Options = DEFAULT, following: int | None = None
) -> list[Action]:
    """The actions that step `step` issues; `following`: micro-batches of the next batch, if not as many."""
    t, count, ahead = step, micro_batches, 1 + options.look_ahead
    after: Name = boundary_begins(t, count, options) if options.early_prepare else ("update", t, -1)
    actions: list[Action] = []
    if t == start:
        actions += _with_retrieves(filling(start, options), range(start, start + 1 + RETRIEVE_AHEAD), start, options)
        actions += [sync(t, start, options), peek(t, start, options)]
        actions += [embed(t, m, start, options) for m in range(min(ahead, count))]
    later = _with_retrieves(preparing(t, start, options, after), [t + 1 + RETRIEVE_AHEAD], start, options)
    for action in window(t, count, options, [sync(t + 1, start, options), *later]):
        if action.stage == "embed":
            continue
        if action.stage == "grad":
            # Before the gradients, so that rows travel while this micro-batch still computes: at the first one of a batch there
            # is nothing else to send.
            if action.micro + ahead < count:
                actions.append(embed(t, action.micro + ahead, start, options))
            if action.micro == max(0, count - ahead):
                actions.append(peek(t + 1, start, options))
            first = range(min(ahead, following or count))
            actions += [embed(t + 1, m, start, options) for m in first if max(0, count - ahead + m) == action.micro]
        actions.append(action)
    return actions


def _with_retrieves(early: Sequence[Action], batches: Sequence[int], start: int, options: Options) -> list[Action]:
    """The early stages of later batches, with rows retrieved for `batches` where that may be early."""
    if not options.early_retrieve:
        return list(early)
    others = [action for action in early if action.stage != "retrieve"]
    return [*others, *(retrieve(batch, start, options) for batch in batches)]


def retrieve(batch: int, start: int, options: Options) -> Action:
    """Leaves out rows of the two batches before, which may not be in the store yet: `peek` and `sync` bring them."""
    stored = batch - RETRIEVE_AHEAD - 1
    waits: tuple[Name, ...] = (("route", batch, -1),)
    waits += (("writeback", stored, -1),) if stored >= start else ()
    action = act("retrieve", batch, waits=waits, options=options)
    left_out = tuple(range(batch - 1, max(stored, start - 1), -1))
    effects = tuple(replace(e, without=left_out) if e.kind == "copy" else e for e in action.effects)
    return replace(action, effects=effects)


def peek(batch: int, start: int, options: Options) -> Action:
    """Waits for this batch's rows and for those of the last one to be up to date, then copies what the last one will change.

    Rows of the batch before that, which are final by then, are copied to stay.
    """
    if batch == start:
        return act("peek", batch, waits=(("retrieve", batch, -1),), options=options)
    action = act("peek", batch, waits=(("retrieve", batch, -1), ("sync", batch - 1, -1)), options=options)
    from_buffer = options.early_retrieve and batch - 2 >= start
    final = copied_rows(batch - 2, batch, without=(batch - 1,)) if from_buffer else ()
    return replace(action, effects=(*action.effects, *final, *peeked(batch)))


def embed(batch: int, micro: int, start: int, options: Options) -> Action:
    """Sends what `peek` copied of rows that the batch before touches too, and all others as they are."""
    action = act("embed", batch, micro, (("peek", batch, -1),), options)
    if batch == start:
        return action
    effects = [e for e in action.effects if e.source != rows(batch)[0]]
    return replace(action, effects=(*effects, *sent_rows(batch)))


def refreshing(batch: int, micro_batches: int, start: int, options: Options) -> list[Action]:
    """For a batch whose first rows have left, after its `sync`: sends them again, as they are now."""
    first = range(min(1 + options.look_ahead, micro_batches))
    return [peek(batch, start, options), *(embed(batch, m, start, options) for m in first)]


def with_peeks(serial: Sequence[Action]) -> list[Action]:
    """A serial list with a `peek` that copies nothing before each `sync`, to compare with."""
    found: list[Action] = []
    for action in serial:
        if action.stage == "sync":
            found.append(replace(act("peek", action.batch), waits=action.waits))
        found.append(action)
    return found
