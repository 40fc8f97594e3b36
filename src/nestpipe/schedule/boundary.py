"""The step boundary, from the last backward pass of a batch to what the next one may start from.

Two paths run side by side.  Rows: the last gradients arrive, `update` changes the batch's buffer, and the next batch's `sync` may
copy from it.  Dense: buckets of gradients are summed as `weight_grad` (or the last backward pass) finishes them, all workers
`agree` that the batch is sound, the optimizer takes its `step`.  They meet in the next `compute`.  `writeback` waits for both,
so that nothing of a batch that was not agreed on reaches the tables.  Where the next batch has been retrieved already, its
first rows travel while the dense path is still on its way.
"""

from __future__ import annotations

from collections.abc import Sequence

from nestpipe.schedule.action import Action, Name, act
from nestpipe.schedule.averaging import averages
from nestpipe.schedule.options import Options


def boundary_begins(batch: int, micro_batches: int, options: Options) -> Name:
    """The action with which the dense compute of a batch is over."""
    return ("weight_grad", batch, -1) if options.defer_weight_grads else ("compute", batch, micro_batches - 1)


def summed(batch: int, micro: int, options: Options) -> list[Action]:
    """What has to be done with gradients that `grad` has brought to the owner of their rows."""
    accumulate = act("accumulate", batch, micro, (("grad", batch, micro),), options)
    if not options.replicates:
        return [accumulate]
    return [accumulate, act("replicate", batch, micro, (accumulate.name,), options)]


def boundary(batch: int, micro_batches: int, options: Options, opening: Sequence[Action] = ()) -> list[Action]:
    """From `reduce` to `step` of one batch; `opening` is what of the next one need not wait for `step`."""
    t = batch
    complete: Name = ("replicate" if options.replicates else "accumulate", t, micro_batches - 1)
    agreed: Name = ("agree", t, -1)
    weights = [act("weight_grad", t, options=options)] if options.defer_weight_grads else []
    made = boundary_begins(t, micro_batches, options)
    early = options.early_reduce
    reduces = [
        act("reduce", t, b, () if early else (made,), options, within=made if early else None)
        for b in range(options.buckets)
    ]
    return [
        *weights,
        *reduces,
        act("agree", t, waits=(reduces[-1].name, complete, *(action.name for action in weights)), options=options),
        act("update", t, waits=(agreed if options.update_waits else complete,), options=options),
        act("writeback", t, waits=(("update", t, -1), agreed), options=options),
        *averages(t, options),
        *opening,
        act("step", t, waits=(agreed,), options=options),
    ]
