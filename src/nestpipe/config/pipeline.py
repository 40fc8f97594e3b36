"""`PipelineConfig`: the `[pipeline]` section of a recipe, the argument of `TrainPipeline`, and what a ladder's rung sets."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args

from nestpipe.config.micro_batches import check_micro_batches

ScheduleName = Literal["serial", "dbp", "fwp", "nested", "semi_async"]
SCHEDULES: tuple[str, ...] = get_args(ScheduleName)


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
    """Micro-batches per batch. Results round differently with another number, and with other values of clustering or
    defer_weight_grads; no other key here changes a bit. "auto" measures 1 to 16 and takes the fastest. [[0, 4], [60, 8]] is 4
    from batch 0 and 8 from batch 60, as an earlier run with "auto" chose."""
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
