"""Frozen-Window Pipelining: rows of later micro-batches travel while this one computes, and so do gradients of earlier ones.

From `sync` to `update` the rows of a batch are frozen, so it does not matter when in between they travel.  `embed` waits for
`sync` alone, `grad` for its own `compute`, and only the first `embed` and the last `grad` of a batch have nothing to hide behind.
"""

from __future__ import annotations

from nestpipe.schedule.action import Action, Name, act

LOOK_AHEAD = 2
"""How many micro-batches `embed` is ahead of `compute`: enough to keep the link busy while gradients wait their turn on it."""


def fwp(step: int, micro_batches: int, start: int = 0) -> list[Action]:
    """The actions that step `step` issues: one batch at a time, its micro-batches overlapped."""
    before: tuple[Name, ...] = (("writeback", step - 1, -1),) if step > start else ()
    actions: list[Action] = []
    for stage in ("load", "move", "route", "retrieve", "sync"):
        actions.append(act(stage, step, waits=before))
        before = ((stage, step, -1),)
    return [*actions, *window(step, micro_batches)]


def window(step: int, micro_batches: int, look_ahead: int = LOOK_AHEAD) -> list[Action]:
    """From the first `embed` of a batch to its `writeback`.

    The network lane runs in list order: rows for `look_ahead` micro-batches first, then in turns the gradients of one and the
    rows of another.  What is on the compute lane runs on the issuing thread, so whatever may start before it stands before it.
    """
    t, count = step, micro_batches
    actions = [_embed(t, m) for m in range(min(1 + look_ahead, count))]
    for m in range(count):
        actions.append(act("compute", t, m, waits=(("embed", t, m), ("move", t, -1))))
        actions.append(act("grad", t, m, waits=(("compute", t, m),)))
        if m + 1 + look_ahead < count:
            actions.append(_embed(t, m + 1 + look_ahead))
        actions.append(act("accumulate", t, m, waits=(("grad", t, m),)))
    return [
        *actions,
        act("reduce", t, waits=(("compute", t, count - 1),)),
        act("agree", t, waits=(("reduce", t, -1), ("accumulate", t, count - 1))),
        # `step` runs on the caller's thread, so what stands behind it in the list is issued late: update and writeback first
        act("update", t, waits=(("agree", t, -1),)),
        act("writeback", t, waits=(("update", t, -1),)),
        act("step", t, waits=(("agree", t, -1),)),
    ]


def _embed(batch: int, micro: int) -> Action:
    return act("embed", batch, micro, waits=(("sync", batch, -1),))
