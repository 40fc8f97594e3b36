"""Varies one setting: how systems scale, and which value is best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from nestpipe.sim.figures import Settings, run
from nestpipe.sim.profile import Profile
from nestpipe.sim.systems import SYSTEMS


@dataclass(frozen=True)
class SweepAxis:
    """A setting to vary."""

    title: str
    values: tuple[float, ...]
    systems: tuple[str, ...]
    vary: Callable[[Settings, float], Settings]
    speedup: bool = False
    """Shows the speedup over torchrec instead of the step."""


ALL = tuple(SYSTEMS)
FEW = ("torchrec", "dbp", "fwp", "nestpipe", "nestpipe+2d-sp")

AXES = {
    "workers": SweepAxis("workers", (128, 256, 512, 1024, 1536, 2560, 5120, 10240), ALL, lambda s, _: s),
    "micro": SweepAxis(
        "micro-batches per batch",
        (2, 4, 8, 16, 32),
        ("nestpipe", "nestpipe+2d-sp"),
        lambda s, value: replace(s, micro_batches=int(value)),
    ),
    "batch": SweepAxis(
        "samples of a worker's batch", (64, 128, 256, 512, 1024, 2048), FEW, lambda s, v: replace(s, batch=int(v)), True
    ),
    "link": SweepAxis(
        "speed of links, times the profile's", (0.25, 0.5, 1, 2, 4, 8), FEW, lambda s, v: replace(s, link=v), True
    ),
    "skew": SweepAxis(
        "busiest owner above the mean", (0, 0.1, 0.25, 0.5, 1, 2), FEW, lambda s, v: replace(s, skew=v), True
    ),
}


def sweep(
    axis: str, profile: Profile, workers: int, settings: Settings, tell: Callable[[float, str], None] = lambda *_: None
) -> list[dict[str, Any]]:
    """Returns a row per system and value."""
    varied = AXES[axis]
    rows: list[dict[str, Any]] = []
    for number, value in enumerate(varied.values):
        tell(number / len(varied.values), f"{varied.title} {value:g}")
        count = int(value) if axis == "workers" else workers
        here = varied.vary(settings, value)
        base = run(SYSTEMS["torchrec"], profile, count, here)
        for name in varied.systems:
            one = base if name == "torchrec" else run(SYSTEMS[name], profile, count, here)
            speedup = base.step_ms / one.step_ms
            rows.append({"axis": axis, "value": value, **vars(one), "qps": one.qps, "speedup": speedup})
    return rows
