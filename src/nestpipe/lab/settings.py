"""What a rung of our own may set: keys of the workload, options of our worker, and knobs of `PipelineConfig`."""

from __future__ import annotations

import runpy
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from nestpipe.config.build import RecipeError, build, convert, nearest
from nestpipe.config.micro_batches import AUTO
from nestpipe.config.pipeline import PipelineConfig

PEERS = Path(__file__).parents[3] / "bench" / "peers"
HSTU_WORKLOAD: dict[str, Any] = {
    "items": 1_000_000,
    "groups": 200,
    "length": 160,
    "negatives": 1,
    "heads": 2,
    "blocks": 2,
}
"""Keys of the workload that only `kind = "hstu"` reads, with their defaults."""
FUXI_WORKLOAD: dict[str, Any] = HSTU_WORKLOAD | {
    "median_length": 8594.0,
    "length": 2048,
    "negatives_from": "each",
    "balance": True,
}
"""Those of `kind = "fuxi"`: generated histories, cut at `length` and dealt to workers by cost unless `balance` is off."""


@dataclass(frozen=True)
class WorkerOptions:
    """Options of our worker, which peers do not have."""

    kind: Literal["dlrm", "hstu", "fuxi"] = "dlrm"
    compute_ms: float | None = None
    """The `timed` model takes the place of the real one: its compute takes this long, and no CPU."""
    dense_parameters: int = 500_000
    """Of the `timed` model."""
    dram_rows: int = 0
    """Rows in DRAM per worker, the others on disk; 0: all in DRAM."""
    disk_path: str = tempfile.gettempdir()
    checkpoint_every: int | None = None
    """Steps between checkpoints, which are written in the background."""
    only: Literal["compute", "wire"] | None = None
    """For limits, whose losses mean nothing: "compute" sends no rows and gradients, "wire" computes nothing."""
    trace: str | None = None
    """A file for the last steps of all workers, for `nestpipe schedule FILE` and ui.perfetto.dev."""


@dataclass(frozen=True)
class RungSettings:
    """The settings of a rung, checked, with all defaults."""

    workload: dict[str, Any]
    options: WorkerOptions
    pipeline: PipelineConfig

    def as_dict(self) -> dict[str, Any]:
        return {**self.workload, **asdict(self.options), **asdict(self.pipeline)}


def read_settings(given: Mapping[str, Any]) -> RungSettings:
    """Sorts and checks what a ladder's workload and a rung set.  RecipeError names a key that is unknown or wrong."""
    names = {field.name for field in fields(WorkerOptions)}
    knobs = {field.name for field in fields(PipelineConfig)} | set(PipelineConfig.RENAMED)
    options = build(WorkerOptions, {key: value for key, value in given.items() if key in names}, "set")
    pipeline = build(PipelineConfig, {key: value for key, value in given.items() if key in knobs}, "pipeline")
    if options.only and pipeline.micro_batches == AUTO:
        raise RecipeError(
            'micro_batches must be a number where only is set: a step without messages cannot tune "auto"'
        )
    workload: dict[str, Any] = runpy.run_path(str(PEERS / "same_samples.py"))["DEFAULTS"]
    own: dict[str, dict[str, Any]] = {"dlrm": {}, "hstu": HSTU_WORKLOAD, "fuxi": FUXI_WORKLOAD}
    workload |= own[options.kind]
    for key in given:
        if key not in names | knobs | set(workload):
            valid = sorted(names | knobs - set(PipelineConfig.RENAMED) | set(workload))
            raise RecipeError(f"unknown key {key!r}: {nearest(key, valid) or 'there are ' + ', '.join(valid)}")
    chosen = {key: convert(type(workload[key]), value, key) for key, value in given.items() if key in workload}
    return RungSettings({**workload, **chosen}, options, pipeline)
