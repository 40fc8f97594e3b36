"""What each stage does to state: the part of a schedule that `check` reasons about.

State is named by tuples.  Some of it is rows (the tables, a batch's buffer, a window, gradients): an effect on rows touches only
the keys that occur in all of `batches` and in none of `without`, and for a micro-batch only those used in it as `use` says.
Whatever is not a copy is an unknown function of everything the action reads, so two schedules are equal when every action reads
the same.

A sweep (eviction) is part of `retrieve`: it looks at the life of all rows but those of the batch before, and chooses.  From then
on those are not read, and `writeback` of the same batch removes them.  To whoever reads, a row that is hidden and one that is
removed are the same, so removal is no effect of its own; what must be the same in all schedules is the choice, and who knows it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from nestpipe.schedule.options import DEFAULT, Options

State = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Effect:
    """One access.  `read`, `write` (a function of what the action reads), `add` (the same, on top of what was there), `copy`."""

    kind: str
    state: State
    source: State | None = None
    """Of a copy."""
    batches: tuple[int, ...] = ()
    """Rows: only of keys that occur in all of these batches.  Empty: all of the state, but for what `without` says."""
    use: str = ""
    """Rows in a micro-batch: "first" or "last" used in it, or "used" in it."""
    without: tuple[int, ...] = ()
    """Rows: only of keys that occur in none of these batches."""


STORE = (("store", "values"), ("store", "state"))
WINDOWED = ("window", "window grads", "arrived")
"""State of which every worker that uses a key has its own.  All other rows have one owner."""


def rows(batch: int) -> tuple[State, State]:
    """An owner's buffer of a batch: values and optimizer state."""
    return ("rows", batch, "values"), ("rows", batch, "state")


def shared_rows(batch: int) -> tuple[Effect, ...]:
    """Rows that batch - 1 touched too: from its buffer into this one's."""
    return copied_rows(batch - 1, batch)


def copied_rows(before: int, batch: int, without: tuple[int, ...] = ()) -> tuple[Effect, ...]:
    """Rows that both touch and none of `without` does: from one buffer into the other, values and optimizer state."""
    pairs = zip(rows(before), rows(batch))
    return tuple(Effect("copy", new, old, batches=(before, batch), without=without) for old, new in pairs)


def sweep(batch: int) -> tuple[Effect, ...]:
    """Chooses by the life of all rows but those that the batch before touches, which may be in the store or not; what that one's
    own sweep has chosen may not be removed yet."""
    return (
        Effect("read", STORE[1], without=(batch - 1,)),
        Effect("read", ("swept", batch - 1)),
        Effect("write", ("swept", batch)),
    )


@functools.lru_cache(maxsize=4096)
def effects_of(stage: str, batch: int, micro: int, options: Options = DEFAULT) -> tuple[Effect, ...]:
    """The effects of a stage, in order: reads see what was there before the action's own writes."""
    t, mine = batch, (batch,)
    values, state = rows(t)
    data, routes, grads = ("data", t), ("routes", t), ("grads", t)
    window, window_grads, arrived = ("window", t), ("window grads", t), ("arrived", t)
    dense, outcome, kept = ("dense",), ("outcome", t), ("kept", t)
    buckets: list[State] = [("dense grads", f"bucket {b}") for b in range(options.buckets)]
    match stage:
        case "load":
            return (Effect("read", ("source",)), Effect("write", data), Effect("add", ("source",)))
        case "move":
            return (Effect("add", data),)
        case "route":
            return (Effect("read", data), Effect("write", routes))
        case "retrieve":
            return (
                Effect("read", routes),
                *(sweep(t) if options.evicts else ()),
                *(Effect("copy", new, old, batches=mine) for old, new in zip(STORE, (values, state))),
                Effect("write", grads, batches=mine),
                Effect("write", window_grads, batches=mine),
            )
        case "sync":
            return (Effect("read", routes),)
        case "embed":
            return (Effect("read", routes), Effect("copy", window, values, batches=mine, use="first"))
        case "compute":
            return (
                Effect("read", data),
                Effect("read", routes),
                Effect("read", dense),
                Effect("read", window, batches=mine, use="used"),
                Effect("add", window_grads, batches=mine, use="used"),
                *(Effect("add" if micro else "write", bucket) for bucket in buckets),
                *([Effect("add", kept)] if options.defer_weight_grads else []),
            )
        case "grad":
            return (Effect("read", routes), Effect("copy", arrived, window_grads, batches=mine, use="last"))
        case "accumulate":
            return (
                Effect("read", routes),
                Effect("read", arrived, batches=mine, use="last"),
                Effect("add", grads, batches=mine, use="last"),
            )
        case "weight_grad":
            return (Effect("read", kept), *(Effect("add", bucket) for bucket in buckets))
        case "reduce":
            return (Effect("add", buckets[micro]),)
        case "agree":
            kind = "add" if options.clips else "read"  # scales all gradients where they are clipped
            return (
                Effect(kind, grads, batches=mine),
                *(Effect(kind, bucket) for bucket in buckets),
                Effect("write", outcome),
            )
        case "step":
            return (Effect("read", outcome), *(Effect("read", bucket) for bucket in buckets), Effect("add", dense))
        case "update":
            return (
                *([Effect("read", outcome)] if options.update_waits else []),
                Effect("read", grads, batches=mine),
                Effect("read", values, batches=mine),
                Effect("read", state, batches=mine),
                Effect("add", values, batches=mine),
                Effect("add", state, batches=mine),
            )
        case "writeback":
            return (
                Effect("read", routes),
                Effect("read", outcome),  # what was not agreed on never reaches the tables
                *([Effect("read", ("swept", t))] if options.evicts else []),
                *(Effect("copy", new, old, batches=mine) for old, new in zip((values, state), STORE)),
            )
    raise ValueError(f"no stage {stage!r}")


@dataclass(frozen=True, slots=True)
class StageEffects(Sequence[Effect]):
    """The effects of a stage, made when somebody looks at them: `check` does, an engine that runs the action does not."""

    stage: str
    batch: int
    micro: int
    options: Options = DEFAULT

    def __len__(self) -> int:
        return len(self._made())

    def __iter__(self) -> Iterator[Effect]:
        return iter(self._made())

    @overload
    def __getitem__(self, place: int) -> Effect: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Effect]: ...
    def __getitem__(self, place: int | slice) -> Effect | Sequence[Effect]:
        return self._made()[place]

    def _made(self) -> tuple[Effect, ...]:
        return effects_of(self.stage, self.batch, self.micro, self.options)
