"""`[checkpoint]`: when to write checkpoints, and how many to keep."""

from __future__ import annotations

from dataclasses import dataclass

from nestpipe.config.checks import above_zero, at_least


@dataclass(frozen=True)
class CheckpointConfig:
    """When to write checkpoints, and how many to keep: none unless `every_steps`, `every_minutes` or `best` is set."""

    every_steps: int | None = None
    """Steps between checkpoints; none = not by steps."""
    every_minutes: float | None = None
    """Minutes between checkpoints; none = not by time."""
    keep: int = 3
    """Checkpoints that are kept, beside what they stand on and the best."""
    full_every: int = 10
    """Every so many checkpoints one has all rows; the others have those that changed since the one before, and stand on it."""
    best: str | None = None
    """Held-out metric, such as auc: a checkpoint is written when an evaluation finds the best so far, and that one is kept."""
    path: str | None = None
    """Directory that all workers share, or a URL such as s3://bucket/run; none = checkpoints/ in the run directory."""
    stop_seconds: float = 60.0
    """After SIGTERM: what a run has to finish its batch and to write a checkpoint, before it is ended."""

    def __post_init__(self) -> None:
        for key in ("every_steps", "keep", "full_every"):
            at_least(f"checkpoint.{key}", getattr(self, key), 1)
        above_zero("checkpoint.every_minutes", self.every_minutes)
        above_zero("checkpoint.stop_seconds", self.stop_seconds)
        for key in ("best", "path"):
            if getattr(self, key) == "":
                raise ValueError(f"checkpoint.{key} is empty: give it a name or leave it out")

    @property
    def on(self) -> bool:
        return bool(self.every_steps or self.every_minutes or self.best)
