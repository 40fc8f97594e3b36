"""Both at once: later batches are prepared as in `dbp`, and the micro-batches of this one overlap as in `fwp`."""

from __future__ import annotations

from nestpipe.schedule.action import Action
from nestpipe.schedule.dbp import early, sync
from nestpipe.schedule.fwp import first_rows, window
from nestpipe.schedule.options import DEFAULT, Options


def nested(step: int, micro_batches: int, start: int = 0, options: Options = DEFAULT) -> list[Action]:
    """The actions that step `step` issues."""

    def opening(batch: int) -> list[Action]:
        return [sync(batch, start, options), *first_rows(batch, micro_batches, options)]

    return [
        *early(step, start, options),
        *(opening(step) if step == start else []),
        *window(step, micro_batches, options, opening(step + 1)),
    ]
