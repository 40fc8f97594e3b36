"""Both at once: later batches are prepared as in `dbp`, and the micro-batches of this one overlap as in `fwp`."""

from __future__ import annotations

from nestpipe.schedule.action import Action
from nestpipe.schedule.dbp import filling, meanwhile, opening
from nestpipe.schedule.fwp import first_rows, window
from nestpipe.schedule.options import DEFAULT, Options


def nested(step: int, micro_batches: int, start: int = 0, options: Options = DEFAULT) -> list[Action]:
    """The actions that step `step` issues.

    Of the next batch only the first rows go on their way early: more would delay the dense gradients on the link.
    """
    return [
        *([*filling(start, options), *opening(step, start, options)] if step == start else []),
        *first_rows(step, micro_batches, options)[1:],
        *window(step, micro_batches, options, meanwhile(step, micro_batches, start, options)),
    ]
