"""`PipelineConfig`: the `[pipeline]` section of a recipe, the argument of `TrainPipeline`, and what a ladder's rung sets."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from nestpipe.config.micro_batches import check_micro_batches

ScheduleName = Literal["serial", "dbp", "fwp", "nested", "semi_async"]
HOST = "host"
"""A group size: the workers of one machine."""
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)
ReplicasName = Literal["exact", "average"]
REPLICAS: tuple[str, ...] = get_args(ReplicasName)


@dataclass(frozen=True)
class PipelineConfig:
    """In which order the work of a step is done.  The result is the same for every schedule but `semi_async`.

    Each default stands here and nowhere else.  None means that the model and its tables decide (`schedule.options.resolve`).
    """

    RENAMED: ClassVar[Mapping[str, str]] = {"late_weights": "defer_weight_grads"}
    """Old spellings that recipes and keyword arguments of `TrainPipeline` may still use."""

    schedule: ScheduleName = "serial"
    """Name of the schedule: plain synchronous, Dual-Buffer Pipelining, Frozen-Window Pipelining, or both. semi_async is inexact
    by design: rows that the batch before touches too are read one batch stale."""
    micro_batches: int | Literal["auto"] | list[list[int]] = 1
    """Micro-batches per batch. Results round differently with another number, and with other values of group_size, clustering or
    defer_weight_grads; beside these only replicas, average_every and moment_scale change a bit. "auto" measures 1 to 16 and takes
    the fastest. [[0, 4], [60, 8]] is 4 from batch 0 and 8 from batch 60, as an earlier run with "auto" chose."""
    group_size: int | Literal["host"] | None = None
    """Workers that hold all rows among them; each group of so many holds a copy, and only summed gradients travel between
    groups. It must divide the number of workers; "host" = the workers of one machine; none = all workers, one group. Results
    round differently with another one."""
    replicas: ReplicasName = "exact"
    """What groups do with their copies of the rows. "exact": gradients are summed over all groups before each update, so copies
    stay equal. "average" (two-dimensional sparse parallelism): each group updates its own with its own gradients, and copies are
    averaged every average_every batches. That is not synchronous training, and needs tables.optimizer = "rowwise_adagrad"."""
    average_every: int = 100
    """Batches between two averages, with replicas = "average". Copies are averaged before an evaluation and a checkpoint, too."""
    moment_scale: float | None = None
    """With replicas = "average": a factor on what a step adds to a row's sum of squared gradients; none = 1 / groups."""
    clustering: bool | None = None
    """Put samples that share keys into the same micro-batch; none = only if memory.window_limit is set."""
    look_ahead: int = 2
    """How many micro-batches rows travel ahead of compute, in fwp, nested and semi_async."""
    early_prepare: bool | None = None
    """Prepare later batches as soon as the compute of a batch ends, in dbp, nested and semi_async; false = once the first
    rows of the next batch have left; none = true where the host's own cores compute."""
    early_retrieve: bool | None = None
    """Retrieve rows while the batch before last is still being written back, in dbp, nested and semi_async. Needs one more row
    buffer, three instead of two (semi_async: four instead of three); none = true where tables.disk_path is set, and in semi_async
    unless tables evict."""
    early_reduce: bool = True
    """All-reduce dense gradients while the last backward pass still runs; set false for re-entrant checkpointing."""
    early_update: bool = True
    """Update rows as soon as their gradients are complete, before all workers agree on the batch (not with clip_norm)."""
    defer_weight_grads: bool = True
    """Compute weight gradients of deferred layers after all backward passes of a batch, while rows travel. Keeps the layers'
    inputs and output gradients of a whole batch in memory; set false where that is too much."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"pipeline.schedule must be one of {', '.join(SCHEDULES)}, not {self.schedule!r}")
        check_micro_batches(self.micro_batches)
        size = self.group_size
        if not (size is None or size == HOST or (type(size) is int and size >= 1)):
            raise ValueError(f"pipeline.group_size must be a number of workers, 'host' or none, not {size!r}")
        if self.replicas not in REPLICAS:
            raise ValueError(f"pipeline.replicas must be one of {', '.join(REPLICAS)}, not {self.replicas!r}")
        if self.replicas == "average" and self.schedule == "semi_async":
            raise ValueError(
                "pipeline.replicas = 'average' and pipeline.schedule = 'semi_async' are both inexact: take one of them"
            )
        if not (type(self.average_every) is int and self.average_every >= 1):
            raise ValueError(f"pipeline.average_every must be a whole number of at least 1, not {self.average_every!r}")
        scale = self.moment_scale
        if not (scale is None or (type(scale) in (int, float) and math.isfinite(scale) and scale > 0)):
            raise ValueError(f"pipeline.moment_scale must be a number above 0 or none, not {scale!r}")
        if (
            not isinstance(self.look_ahead, numbers.Integral)
            or isinstance(self.look_ahead, bool)
            or self.look_ahead < 0
        ):
            raise ValueError(f"pipeline.look_ahead must be a whole number of at least 0, not {self.look_ahead!r}")
        for key in ("early_reduce", "early_update", "defer_weight_grads"):
            if not isinstance(getattr(self, key), bool):
                raise ValueError(f"pipeline.{key} must be true or false, not {getattr(self, key)!r}")
        for key in ("clustering", "early_prepare", "early_retrieve"):
            if not isinstance(getattr(self, key), bool | None):
                raise ValueError(f"pipeline.{key} must be true, false or none, not {getattr(self, key)!r}")

    def changed(self, **knobs: Any) -> PipelineConfig:
        """The same with some knobs changed; old spellings are accepted.  TypeError for a name that is no knob."""
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in knobs.items():
            current = self.RENAMED.get(name, name)
            if current not in known:
                raise TypeError(f"TrainPipeline has no argument {name!r}; the pipeline's are {', '.join(known)}")
            if current != name and current in knobs:
                raise TypeError(f"{name} is the old name of {current}: give only {current}")
            known[current] = value
        return PipelineConfig(**known)
