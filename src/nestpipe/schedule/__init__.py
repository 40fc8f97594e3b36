"""Training schedules as lists of actions.  Pure Python: knows nothing of torch, devices or models."""

from collections.abc import Callable

from nestpipe.schedule.action import Action
from nestpipe.schedule.dbp import dbp
from nestpipe.schedule.fwp import fwp
from nestpipe.schedule.nested import nested
from nestpipe.schedule.options import DEFAULT, Options
from nestpipe.schedule.semi_async import semi_async, with_peeks
from nestpipe.schedule.serial import serial
from nestpipe.schedule.stages import LANES, STAGES

Builder = Callable[..., list[Action]]

BUILDERS: dict[str, Builder] = {
    "serial": serial,
    "dbp": dbp,
    "fwp": fwp,
    "nested": nested,
    "semi_async": semi_async,
}
"""Name to builder: builder(step, micro_batches, start, options) gives the actions that one step issues, in order.

`start` is the first step since the pipeline was last empty: nothing before it is waited for."""

LOOKING_AHEAD = ("dbp", "nested", "semi_async")
"""Schedules that retrieve rows of a batch before the one before it has updated them."""

STALE = ("semi_async",)
"""Schedules that are inexact by design: rows that the batch before touches too are read as they were before its update."""

EXACT = tuple(name for name in BUILDERS if name not in STALE)


def build(name: str, batches: int, micro_batches: int, options: Options = DEFAULT) -> list[Action]:
    """The whole list of a schedule for a number of batches."""
    return build_by(BUILDERS[name], batches, micro_batches, options)


def reference(name: str, batches: int, micro_batches: int, options: Options = DEFAULT) -> list[Action]:
    """The serial list that a schedule is compared with: it has the same actions."""
    serial_list = build("serial", batches, micro_batches, options)
    return with_peeks(serial_list) if name in STALE else serial_list


def build_by(builder: Builder, batches: int, micro_batches: int, options: Options = DEFAULT) -> list[Action]:
    """What is issued for batches beyond the last is left out."""
    steps = (builder(step, micro_batches, 0, options) for step in range(batches))
    return [action for step in steps for action in step if action.batch < batches]


__all__ = [
    "BUILDERS",
    "EXACT",
    "LANES",
    "LOOKING_AHEAD",
    "STAGES",
    "STALE",
    "Action",
    "Builder",
    "Options",
    "build",
    "build_by",
    "dbp",
    "fwp",
    "nested",
    "reference",
    "semi_async",
    "serial",
]
