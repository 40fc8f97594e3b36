"""Semi-asynchronous: `nested`, but rows of the next batch leave before this one has updated them.  Stale by one batch, by design.

What batch t+1 computes with, of the rows that t touches too, is the version before `update(t)`: all of them, in all of its
micro-batches, on every machine.  `peek(t+1)` copies these values from t's buffer, after `sync(t)` and before `update(t)`, and so
`embed(t+1)` need not wait for the boundary: it runs `look_ahead` micro-batches ahead of `compute`, across it.

No update is lost.  Values and optimizer state that `update(t+1)` starts from are those that `update(t)` left: `sync(t+1)` copies
them as in `dbp`, but only once the last rows of t+1 have left, so that no batch reads a mixture.  So the row buffer of t is in use
until then, and there are three.

The first batch of a pipeline that was empty has nothing before it, and reads what `serial` reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nestpipe.schedule.action import Action, Name, act
from nestpipe.schedule.boundary import boundary_begins
from nestpipe.schedule.dbp import filling, preparing
from nestpipe.schedule.dbp import sync as exact_sync
from nestpipe.schedule.effects import peeked_rows
from nestpipe.schedule.fwp import window
from nestpipe.schedule.options import DEFAULT, Options


def semi_async(
    step: int, micro_batches: int, start: int = 0, options: Options = DEFAULT, following: int | None = None
) -> list[Action]:
    """The actions that step `step` issues; `following`: micro-batches of the next batch, if not as many."""
    t, count, ahead = step, micro_batches, 1 + options.look_ahead
    after: Name = boundary_begins(t, count, options) if options.early_prepare else ("update", t, -1)
    actions: list[Action] = []
    if t == start:
        actions += [*_early(filling(start, options)), peek(t, start, options)]
        actions += [_embed(t, m, options) for m in range(min(ahead, count))]
    turn = max(0, count - ahead)
    for action in window(t, count, options, _early(preparing(t, start, options, after))):
        if action.stage == "grad":
            # Before the gradients, so that they travel while this micro-batch still computes.
            if action.micro == turn:
                actions += [sync(t, count, start, options), peek(t + 1, start, options)]
            actions += [
                _embed(t + 1, m, options)
                for m in range(min(ahead, following or count))
                if max(0, count - ahead + m) == action.micro
            ]
        actions.append(_embed(t, action.micro, options) if action.stage == "embed" else action)
    return actions


def peek(batch: int, start: int, options: Options) -> Action:
    """Waits for this batch's rows and for those of the last one to be up to date, then copies what the last one will change."""
    if batch == start:
        return act("peek", batch, waits=(("retrieve", batch, -1),), options=options)
    action = act("peek", batch, waits=(("retrieve", batch, -1), ("sync", batch - 1, -1)), options=options)
    return replace(action, effects=(*action.effects, *peeked_rows(batch)))


def sync(batch: int, micro_batches: int, start: int, options: Options) -> Action:
    """As in `dbp`, once all rows of the batch have left."""
    action = exact_sync(batch, start, options)
    return replace(action, waits=(*action.waits, ("embed", batch, micro_batches - 1)))


def refreshing(batch: int, micro_batches: int, start: int, options: Options) -> list[Action]:
    """For a batch whose first rows have left, after the one before it is updated: sends them again, as they are now."""
    waits: tuple[Name, ...] = (("sync", batch, -1),)
    embeds = [act("embed", batch, m, waits, options) for m in range(min(1 + options.look_ahead, micro_batches))]
    return [exact_sync(batch, start, options), *embeds]


def with_peeks(serial: Sequence[Action]) -> list[Action]:
    """A serial list with a `peek` that copies nothing before each `sync`, to compare with."""
    found: list[Action] = []
    for action in serial:
        if action.stage == "sync":
            found.append(replace(act("peek", action.batch), waits=action.waits))
        found.append(action)
    return found


def _embed(batch: int, micro: int, options: Options) -> Action:
    return act("embed", batch, micro, (("peek", batch, -1),), options)


def _early(actions: Sequence[Action]) -> list[Action]:
    """`sync` frees a buffer too late to wait for it: rows are retrieved into a third one."""
    return [replace(a, waits=tuple(wait for wait in a.waits if wait[0] != "sync")) for a in actions]
