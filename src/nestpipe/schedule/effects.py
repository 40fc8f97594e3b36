"""Effects: what an action does to state.  `check` reasons about nothing else.

State is named by tuples.  Some of it is rows (the tables, a batch's buffer, a window, gradients).  An effect on rows touches only
the keys that occur in all of `batches` and in none of `without`, and for a micro-batch only those used in it as `use` says.
Whatever is not a copy is an unknown function of everything the action reads.  So two schedules are equal when every action reads
the same.

A sweep (eviction) is part of `retrieve`: it reads the eviction columns of all rows except those of the batch before, and marks
rows.  From then on marked rows are not read, and `writeback` of the same batch removes them.  A reader cannot tell a marked row
from a removed one, so the removal is no effect of its own.  All schedules must mark the same rows for the same batches.
"""

from __future__ import annotations

from dataclasses import dataclass

State = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Effect:
    """One access.  `read`, `write` (a function of what the action reads), `add` (the same, on top of what was there), `copy`."""

    kind: str
    state: State
    source: State | None = None
    """Of a copy."""
    batches: tuple[int, ...] = ()
    """Rows: only of keys that occur in all of these batches.  Empty: all of the state, but for what `without` says.

    Of rows that each worker has for itself: only of keys that the worker itself has in the first of them."""
    use: str = ""
    """Rows in a micro-batch: "first" or "last" used in it, or "used" in it."""
    without: tuple[int, ...] = ()
    """Rows: only of keys that occur in none of these batches."""


STORE = (("store", "values"), ("store", "state"))
WINDOWED = ("window", "window grads", "arrived", "group grads")
"""State of which every worker that uses a key has its own.  Of "group grads" every replica group has its own: for these, who
uses a key is a group of workers.  No copy leads from a worker's state to a group's, so no class has to say both.  All other rows
have one owner."""


def rows(batch: int) -> tuple[State, State]:
    """An owner's buffer of a batch: values and optimizer state."""
    return ("rows", batch, "values"), ("rows", batch, "state")


def shared_rows(batch: int) -> tuple[Effect, ...]:
    """Rows that batch - 1 touched too: from its buffer into this one's."""
    return copied_rows(batch - 1, batch)


def peeked(batch: int) -> tuple[Effect, ...]:
    """Values of rows that batch - 1 touches too: from its buffer to beside this one's rows, to be sent and not to be updated."""
    return (Effect("copy", ("peeked", batch), rows(batch - 1)[0], batches=(batch - 1, batch)),)


def sent_rows(batch: int) -> tuple[Effect, ...]:
    """What a micro-batch uses first, into its workers' windows: what was peeked, and other rows as they are."""
    window: State = ("window", batch)
    return (
        Effect("copy", window, ("peeked", batch), batches=(batch, batch - 1), use="first"),
        Effect("copy", window, rows(batch)[0], batches=(batch,), use="first", without=(batch - 1,)),
    )


def copied_rows(before: int, batch: int, without: tuple[int, ...] = ()) -> tuple[Effect, ...]:
    """Rows that both touch and none of `without` does: from one buffer into the other, values and optimizer state."""
    pairs = zip(rows(before), rows(batch))
    return tuple(Effect("copy", new, old, batches=(before, batch), without=without) for old, new in pairs)


def sweep(batch: int) -> tuple[Effect, ...]:
    """Marks by the eviction columns of all rows except those that the batch before touches: these may be in the store or not.
    Rows that the sweep before has marked may not be removed yet."""
    return (
        Effect("read", STORE[1], without=(batch - 1,)),
        Effect("read", ("swept", batch - 1)),
        Effect("write", ("swept", batch)),
    )
