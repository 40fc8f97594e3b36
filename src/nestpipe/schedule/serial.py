"""The plain synchronous schedule: one batch at a time, one stage after another.  What every other schedule must equal."""

from __future__ import annotations

from nestpipe.schedule.action import Action, Name, act
from nestpipe.schedule.averaging import averaged_after, tables_final
from nestpipe.schedule.options import DEFAULT, Options


def serial(step: int, micro_batches: int, start: int = 0, options: Options = DEFAULT) -> list[Action]:
    """The actions that step `step` of training issues: all of that batch, each waiting for the one before it."""
    names: list[Name] = [(stage, step, -1) for stage in ("load", "move", "route", "retrieve", "sync")]
    replicate = ("replicate",) if options.replicates else ()
    for micro in range(micro_batches):
        names += [(stage, step, micro) for stage in ("embed", "compute", "grad", "accumulate", *replicate)]
    names += [("weight_grad", step, -1)] if options.defer_weight_grads else []
    names += [("reduce", step, bucket) for bucket in range(options.buckets)]
    names += [(stage, step, -1) for stage in ("agree", "step", "update", "writeback")]
    names += [("average", step, -1)] if averaged_after(step, options) else []
    actions: list[Action] = []
    previous: tuple[Name, ...] = (tables_final(step - 1, options),) if step > start else ()
    for stage, batch, micro in names:
        actions.append(act(stage, batch, micro, previous, options))
        previous = ((stage, batch, micro),)
    return actions
