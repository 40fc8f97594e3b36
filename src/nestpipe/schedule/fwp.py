"""Frozen-Window Pipelining: rows of later micro-batches travel while this one computes, and so do gradients of earlier ones.

From `sync` to `update` the rows of a batch are frozen, so it does not matter when in between they travel.  `embed` waits for
`sync` alone, `grad` for its own `compute`, and only the first `embed` and the last `grad` of a batch have nothing to hide behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from nestpipe.schedule.action import Action, Name, act
from nestpipe.schedule.averaging import tables_final
from nestpipe.schedule.boundary import boundary, summed
from nestpipe.schedule.options import DEFAULT, Options


def fwp(step: int, micro_batches: int, start: int = 0, options: Options = DEFAULT) -> list[Action]:
    """The actions that step `step` issues: one batch at a time, its micro-batches overlapped."""
    before: tuple[Name, ...] = (tables_final(step - 1, options),) if step > start else ()
    actions: list[Action] = []
    for stage in ("load", "move", "route", "retrieve", "sync"):
        actions.append(act(stage, step, waits=before, options=options))
        before = ((stage, step, -1),)
    return [*actions, *first_rows(step, micro_batches, options), *window(step, micro_batches, options)]


def first_rows(batch: int, micro_batches: int, options: Options) -> list[Action]:
    """Rows for the first `look_ahead` + 1 micro-batches."""
    return [_embed(batch, m, options) for m in range(min(1 + options.look_ahead, micro_batches))]


def window(batch: int, micro_batches: int, options: Options, opening: Sequence[Action] = ()) -> list[Action]:
    """What comes after `first_rows`, to the end of the batch: in turns the gradients of one micro-batch and rows of another.

    `opening`: of the next batch, for `boundary`.
    """
    t, count, ahead = batch, micro_batches, 1 + options.look_ahead
    actions: list[Action] = []
    for m in range(count):
        actions.append(act("compute", t, m, (("embed", t, m), ("move", t, -1)), options))
        actions.append(act("grad", t, m, (("compute", t, m),), options))
        if m + ahead < count:
            actions.append(_embed(t, m + ahead, options))
        actions += summed(t, m, options)
    return [*actions, *boundary(t, count, options, opening)]


def _embed(batch: int, micro: int, options: Options) -> Action:
    return act("embed", batch, micro, (("sync", batch, -1),), options)
