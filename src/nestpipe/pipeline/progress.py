"""What a step leaves to the caller: `Progress`, or `NotFinite` and nothing changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nestpipe.data.batch import Batch
from nestpipe.errors import NestPipeError

REQUESTS = ("checkpoint", "stop")
"""What a worker may ask all others to do after a step.  All learn of it in `agree`, so all do it after the same step."""


class NotFinite(NestPipeError, ArithmeticError):
    """A loss or gradient was NaN or infinite; nothing of that batch was applied."""

    on_all_workers = True
    """All workers raise it for the same batch."""


@dataclass(frozen=True)
class Progress:
    """One step that was taken."""

    batch: int
    loss: float
    """Mean over the global batch, the same on every worker."""
    samples: int
    """Of the global batch."""
    grad_norm: float
    micros: list[Batch]
    """This worker's micro-batches."""
    outputs: list[Any]
    """What the model returned for each of them beside its loss; None where a micro-batch was empty here."""
    requests: frozenset[str] = frozenset()
    """What any worker requested (`TrainPipeline.request`) before this step's `agree`, the same on every worker."""
    compute_seconds: float = 0.0
    """What this worker's forward and backward passes took: CPU time of the compute lane, without waits; NaN on a device."""
