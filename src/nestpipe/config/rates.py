"""How the learning rate moves over a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from nestpipe.config.checks import above_zero

Decay = Literal["none", "linear", "cosine", "inverse_sqrt"]


@dataclass(frozen=True)
class RateSchedule:
    """A factor on the learning rate for every step, from the step's number alone: a resumed run continues where it was.

    Error messages begin with the field's name, so that a recipe section can put its own name in front.
    """

    warmup_steps: int = 0
    decay: Decay = "none"
    decay_steps: int = 0
    decay_to: float = 0.0

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, not {self.warmup_steps}")
        lowest = 0 if self.decay == "none" else 1
        if self.decay_steps < lowest:
            raise ValueError(f"decay_steps must be at least {lowest} with decay '{self.decay}', not {self.decay_steps}")
        if not 0 <= self.decay_to <= 1:
            raise ValueError(f"decay_to must be from 0 to 1 (a share of the rate), not {self.decay_to}")

    def factor(self, step: int) -> float:
        """The factor of the step with this number, counted from 0: up to 1 at `warmup_steps`, then down to `decay_to`.

        Warm-up rises evenly over steps 0 to `warmup_steps`, and its first step is above 0: a step at rate 0 would spend
        a batch and still fill Adagrad's and Adam's state.  `linear` and `cosine` arrive after `decay_steps` and stay.
        `inverse_sqrt` falls as 1/sqrt(1 + s / decay_steps), s steps after warm-up, until it meets `decay_to`; the usual
        transformer schedule is `decay_steps` = `warmup_steps`.
        """
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.decay == "none":
            return 1.0
        progress = (step - self.warmup_steps) / self.decay_steps
        if self.decay == "inverse_sqrt":
            return max(self.decay_to, 1 / math.sqrt(1 + progress))
        if progress >= 1:
            return self.decay_to
        left = 1 - progress if self.decay == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return self.decay_to + (1 - self.decay_to) * left


class LearningConfig(Protocol):
    """What `[tables]` and `[dense]` have in common."""

    @property
    def lr(self) -> float: ...
    @property
    def eps(self) -> float | None: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    def rates(self) -> RateSchedule: ...


def check_rates(section: str, config: LearningConfig) -> None:
    """ValueError, naming the key, unless learning rate, eps, betas and the rate schedule make sense."""
    above_zero(f"{section}.lr", config.lr)
    above_zero(f"{section}.eps", config.eps)
    if not all(0 <= beta < 1 for beta in config.betas):
        raise ValueError(f"{section}.betas must be from 0 to below 1, not {list(config.betas)}")
    try:
        config.rates()
    except ValueError as error:
        raise ValueError(f"{section}.{error}") from error
