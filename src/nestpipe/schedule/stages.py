"""Every stage of a batch, one record each: where it runs, what it costs to draw, and what it does to state.

To add a stage: write its effects as a function, give it a record in `STAGES`, place it in the lists that run it (`serial`, `fwp`,
`dbp`, `boundary`), and give `pipeline.stages.PipelineStages` a method of its name.  `check` then proves the new lists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, overload

from nestpipe.schedule.effects import STORE, Effect, State, rows, sweep
from nestpipe.schedule.options import DEFAULT, Options

LANE_COLOURS = {
    "data": "#8c8c8c",
    "copy": "#bbbbbb",
    "route": "#997700",
    "storage": "#aa3377",
    "network": "#ee7733",
    "replica": "#cc3311",
    "dense": "#009988",
    "update": "#228833",
    "writeback": "#cc6699",
    "compute": "#4477aa",
}
"""Every lane, in the order in which pictures show them, with its colour."""

LANES: tuple[str, ...] = tuple(LANE_COLOURS)
CALLERS_LANE = "compute"
"""The lane that runs on the thread which issues the list, so that a user's model runs where the user called it from."""

Part = Literal["batch", "micro-batch", "bucket"]
Share = Literal["lookup", "all2all", "dense", "compute"]


@dataclass(frozen=True, slots=True)
class Stage:
    """What every room knows about a stage."""

    name: str
    lane: str
    part: Part
    """What one action of it handles: a batch, one of its micro-batches, or one bucket of dense gradients."""
    share: Share
    """To which share of a step its exposed time counts, as the published figures divide it."""
    cost: float
    """Nominal cost of a whole batch, to draw with: the right order of magnitude on a cluster, measured nowhere."""
    effects: Callable[[int, int, Options], tuple[Effect, ...]]
    """(batch, micro-batch or bucket, options) to what it does to state."""
    white: float = 0.0
    """Share of white in its colour, to tell it from other stages on its lane."""

    @property
    def colour(self) -> str:
        """Its lane's colour, as light as the stage wants it."""
        return tint(LANE_COLOURS[self.lane], self.white)


def tint(colour: str, white: float) -> str:
    """The colour #rrggbb with a share of white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in parts)


# What each stage does to state.  Reads see what was there before the action's own writes.


def _data(t: int) -> State:
    return ("data", t)


def _routes(t: int) -> State:
    return ("routes", t)


def _grads(t: int) -> State:
    return ("grads", t)


def _group_grads(t: int) -> State:
    return ("group grads", t)


def _window(t: int) -> State:
    return ("window", t)


def _window_grads(t: int) -> State:
    return ("window grads", t)


def _arrived(t: int) -> State:
    return ("arrived", t)


def _outcome(t: int) -> State:
    return ("outcome", t)


def _deferred(t: int) -> State:
    return ("deferred", t)


DENSE: State = ("dense",)
SOURCE: State = ("source",)


def _buckets(options: Options) -> list[State]:
    return [("dense grads", f"bucket {b}") for b in range(options.buckets)]


def _load(t: int, micro: int, options: Options) -> tuple[Effect, ...]:
    return (Effect("read", SOURCE), Effect("write", _data(t)), Effect("add", SOURCE))


def _move(t: int, micro: int, options: Options) -> tuple[Effect, ...]:
    return (Effect("add", _data(t)),)


def _route(t: int, micro: int, options: Options) -> tuple[Effect, ...]:
    return (Effect("read", _data(t)), Effect("write", _routes(t)))


def _retrieve(t: int, micro: int, options: Options) -> tuple[Effect, ...]:
    return (
        Effect("read", _routes(t)),
        *(sweep(t) if options.evicts else ()),
        *(Effect("copy", new, old, batches=(t,)) for old, new in zip(STORE, rows(t))),
        Effect("write", _grads(t), batches=(t,)),
        *([Effect("write", _group_grads(t), batches=(t,))] if options.replicates else []),
        Effect("write", _window_grads(t), batches=(t,)),
    )


def _peek(t: int, micro: int, options: Options) -> tuple[Effect, ...]:
    return (Effect("read", _routes(t)),)  # `semi_async` adds the rows that it copies


def _sync(t: int, micro: int, options: Options) -> tuple[Effect, ...]:
    return (Effect("read", _routes(t)),)  # `dbp` adds the rows that it copies


def _embed(t: int, micro: int, options: Options) -> tuple[Effect, ...]:
    values, _ = rows(t)
    return (Effect("read", _routes(t)), Effect("copy", _window(t), values, batches=(t,), use="first"))


def _compute(t: int, micro: int, options: Options) -> tuple[Effect, ...]:
    return (
        Effect("read", _data(t)),
        Effect("read", _routes(t)),
        Effect("read", DENSE),
        Effect("read", _window(t), batches=(t,), use="used"),
        Effect("add", _window_grads(t), batches=(t,), use="used"),
        *(Effect("add" if micro else "write", bucket) for bucket in _buckets(options)),
        *([Effect("add", _deferred(t))] if options.defer_weight_grads else []),
    )


def _grad(t: int, micro: int, options: Options) -> tuple[Effect, ...]:
    return (Effect("read", _routes(t)), Effect("copy", _arrived(t), _window_grads(t), batches=(t,), use="last"))


def _accumulate(t: int, micro: int, options: Options) -> tuple[Effect, ...]:
    """With replica groups, a worker's last use may lie anywhere between the first and the last use in its group."""
    own = Effect("add", _group_grads(t), batches=(t,), use="used")
    return (
        Effect("read", _routes(t)),
        Effect("read", _arrived(t), batches=(t,), use="last"),
        own if options.replicates else Effect("add", _grads(t), batches=(t,), use="last"),
    )


def _replicate(t: int, micro: int, options: Options) -> tuple[Effect, ...]:
    return (
        Effect("read", _routes(t)),
        Effect("read", _group_grads(t), batches=(t,), use="last"),
        Effect("add", _grads(t), batches=(t,), use="last"),
    )


def _weight_grad(t: int, micro: int, options: Options) -> tuple[Effect, ...]:
    return (Effect("read", _deferred(t)), *(Effect("add", bucket) for bucket in _buckets(options)))


def _reduce(t: int, bucket: int, options: Options) -> tuple[Effect, ...]:
    return (Effect("add", _buckets(options)[bucket]),)


def _agree(t: int, micro: int, options: Options) -> tuple[Effect, ...]:
    kind = "add" if options.clips else "read"  # clipping scales all gradients
    return (
        Effect(kind, _grads(t), batches=(t,)),
        *(Effect(kind, bucket) for bucket in _buckets(options)),
        Effect("write", _outcome(t)),
    )


def _step(t: int, micro: int, options: Options) -> tuple[Effect, ...]:
    return (
        Effect("read", _outcome(t)),
        *(Effect("read", bucket) for bucket in _buckets(options)),
        Effect("add", DENSE),
    )


def _update(t: int, micro: int, options: Options) -> tuple[Effect, ...]:
    values, state = rows(t)
    return (
        *([Effect("read", _outcome(t))] if options.update_waits else []),
        Effect("read", _grads(t), batches=(t,)),
        Effect("read", values, batches=(t,)),
        Effect("read", state, batches=(t,)),
        Effect("add", values, batches=(t,)),
        Effect("add", state, batches=(t,)),
    )


def _writeback(t: int, micro: int, options: Options) -> tuple[Effect, ...]:
    return (
        Effect("read", _routes(t)),
        Effect("read", _outcome(t)),  # a batch that the workers did not agree on never reaches the tables
        *([Effect("read", ("swept", t))] if options.evicts else []),
        *(Effect("copy", new, old, batches=(t,)) for old, new in zip(rows(t), STORE)),
    )


def _average(t: int, micro: int, options: Options) -> tuple[Effect, ...]:
    """Rows of all batches: a function of what all replicas have."""
    return tuple(Effect("add", state) for state in STORE)


STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("load", "data", "batch", "lookup", 2, _load),
        Stage("move", "copy", "batch", "lookup", 1, _move),
        Stage("route", "route", "batch", "lookup", 2, _route),
        Stage("retrieve", "storage", "batch", "lookup", 3, _retrieve),
        Stage("peek", "update", "batch", "lookup", 1, _peek, white=0.85),
        Stage("sync", "update", "batch", "lookup", 1, _sync, white=0.75),
        Stage("embed", "network", "micro-batch", "all2all", 2, _embed),
        Stage("compute", "compute", "micro-batch", "compute", 4, _compute),
        Stage("grad", "network", "micro-batch", "all2all", 2, _grad, white=0.5),
        Stage("accumulate", "update", "micro-batch", "lookup", 1, _accumulate, white=0.5),
        Stage("replicate", "replica", "micro-batch", "all2all", 1, _replicate),
        Stage("weight_grad", "compute", "batch", "compute", 1, _weight_grad, white=0.35),
        Stage("reduce", "dense", "bucket", "dense", 1, _reduce),
        Stage("agree", "dense", "batch", "dense", 1, _agree, white=0.5),
        Stage("step", "compute", "batch", "compute", 1, _step, white=0.7),
        Stage("update", "update", "batch", "lookup", 1, _update),
        Stage("writeback", "writeback", "batch", "lookup", 2, _writeback),
        Stage("average", "replica", "batch", "all2all", 4, _average, white=0.5),
    )
}
"""In the order in which a batch passes them."""

RENAMED = {"weights": "weight_grad"}
"""Stages by the names that traces and summaries of older runs have."""


@functools.lru_cache(maxsize=4096)
def effects_of(stage: str, batch: int, micro: int, options: Options = DEFAULT) -> tuple[Effect, ...]:
    """The effects of one action, in order."""
    return STAGES[stage].effects(batch, micro, options)


@dataclass(frozen=True, slots=True)
class StageEffects(Sequence[Effect]):
    """The effects of an action, made on first look: `check` looks, an engine that runs the action does not."""

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
