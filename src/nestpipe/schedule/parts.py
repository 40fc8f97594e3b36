"""What a step is spent on: stages by what they wait for, as the published figures divide it."""

from __future__ import annotations

from collections.abc import Mapping

from nestpipe.schedule.timeline import BETWEEN

LOOKUP = ("load", "move", "route", "retrieve", "sync", "accumulate", "update", "writeback")
ALL2ALL = ("embed", "grad")
DENSE = ("reduce", "agree")
COMPUTE = ("compute", "weight_grad", "step", BETWEEN)

PARTS: dict[str, tuple[str, ...]] = {
    "lookup": LOOKUP,
    "all2all": ALL2ALL,
    "dense": DENSE,
    "compute": COMPUTE,
}


def divide(exposed: Mapping[str, float]) -> dict[str, float]:
    """Exposed time of each part, from that of each stage."""
    return {part: sum(exposed.get(stage, 0.0) for stage in stages) for part, stages in PARTS.items()}
