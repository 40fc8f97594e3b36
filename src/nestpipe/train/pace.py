"""How far and how fast a run is."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from nestpipe.comm.world import World
from nestpipe.config.training import TrainConfig
from nestpipe.pipeline import Progress
from nestpipe.train.metrics import ClickMetrics, are_scores

SETTLING_STEPS = 5
"""The first steps compile kernels and fill caches; samples/s leaves them out."""


class Pace:
    """Counts steps and samples, keeps the losses and scores since the last log line, and measures time without evaluation."""

    def __init__(self, config: TrainConfig) -> None:
        self.total_steps = config.steps
        self.steps = 0
        self.samples = 0
        self._losses: deque[float] = deque(maxlen=config.log_every)
        self._scores = ClickMetrics(logits=True)
        self._auc: float | None = None
        self._paused = 0.0
        self._started = time.perf_counter()
        self._settled: tuple[float, int] | None = None
        self._began = 0

    @property
    def over(self) -> bool:
        return self.total_steps is not None and self.steps >= self.total_steps

    @property
    def steps_here(self) -> int:
        """Steps of this process: without those before a checkpoint that it resumed from."""
        return self.steps - self._began

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"samples": self.samples, "seconds": self.seconds(), "losses": list(self._losses)}

    def resume(self, steps: int, state: dict[str, Any]) -> None:
        """Takes up what `state` gave after `steps` steps."""
        self.steps = self._began = steps
        self.samples = int(state.get("samples", 0))
        self._started -= float(state.get("seconds", 0.0))
        self._losses.extend(state.get("losses", []))
        self._settled = self.seconds(), self.samples

    def count(self, step: Progress) -> bool:
        """Counts a step; true once, when the settling steps are over."""
        self.steps += 1
        self.samples += step.samples
        self._losses.append(step.loss)
        for batch, outputs in zip(step.micros, step.outputs):
            if are_scores(outputs, batch.labels):
                self._scores.update(outputs, batch.labels)
        if self.steps - self._began != SETTLING_STEPS:
            return False
        self._settled = self.seconds(), self.samples
        return True

    def window(self, world: World) -> dict[str, Any]:
        """The log line of the steps since the last one.  Training AUC uses predictions made before each update."""
        scores = self._scores.compute(world.groups.get("metrics"))
        self._scores.reset()
        line = {"loss": self.mean_loss(), "samples": self.samples, "seconds": self.seconds()}
        line["samples_per_s"] = self.samples_per_s()
        if scores["samples"]:
            self._auc = scores["auc"]
            line |= {"auc": scores["auc"], "ne": scores["ne"]}
        return line

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside does not count."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - began

    def seconds(self) -> float:
        return time.perf_counter() - self._started - self._paused

    def samples_per_s(self) -> float:
        seconds, samples = self._settled if self._settled and self.steps - self._began > SETTLING_STEPS else (0.0, 0)
        return (self.samples - samples) / max(self.seconds() - seconds, 1e-9)

    def mean_loss(self) -> float:
        return sum(self._losses) / max(1, len(self._losses))

    def fraction(self, of_data: float) -> float:
        return max(of_data, self.steps / self.total_steps if self.total_steps else 0.0)

    def status(self) -> str:
        auc = "" if self._auc is None else f"  auc {self._auc:.4f}"
        return f"step {self.steps}  {self.samples_per_s():,.0f} samples/s  loss {self.mean_loss():.4f}{auc}"
