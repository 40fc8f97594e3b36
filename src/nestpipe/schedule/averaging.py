"""Replicas that train on their own and are averaged every so many batches: which batches, and what waits for it.

`average(t)` follows `writeback(t)` of every k-th batch and changes rows of the tables.  So nothing that was read before may be
used after: the first batch behind it is retrieved after it, as in a pipeline that was empty, and those behind that one do not
look past it.  Data, keys and dense gradients go on as they were.
"""

from __future__ import annotations

from nestpipe.schedule.action import Action, Name, act
from nestpipe.schedule.options import Options


def averaged_after(batch: int, options: Options) -> bool:
    """Whether replicas are averaged at the end of this batch."""
    return options.average_every > 0 and (batch + 1) % options.average_every == 0


def inexact(options: Options) -> str | None:
    """In what training differs from synchronous training; None where it does not."""
    return differing(options.average_every) if options.average_every else None


def differing(every: int) -> str:
    return f"replicas differ for up to {every} step{'s' * (every > 1)}"


def first_of_run(batch: int, start: int, options: Options) -> int:
    """The first batch of those up to this one between which nothing but their own updates changes rows."""
    return max(start, batch - batch % options.average_every) if options.average_every else start


def opens_late(batch: int, start: int, options: Options) -> bool:
    """Whether the rows of this batch can be retrieved only when the one before it has been averaged."""
    return batch > start and averaged_after(batch - 1, options)


def tables_final(batch: int, options: Options) -> Name:
    """The action with which the tables are as this batch leaves them."""
    return ("average" if averaged_after(batch, options) else "writeback", batch, -1)


def averages(batch: int, options: Options) -> list[Action]:
    """What follows the `writeback` of a batch."""
    due = averaged_after(batch, options)
    return [act("average", batch, waits=(("writeback", batch, -1),), options=options)] if due else []
