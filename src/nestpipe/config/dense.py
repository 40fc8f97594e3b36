"""`[dense]`: how the model's ordinary parameters learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nestpipe.config.checks import at_least
from nestpipe.config.rates import Decay, RateSchedule, check_rates


@dataclass(frozen=True)
class DenseConfig:
    """How the model's ordinary parameters learn."""

    optimizer: Literal["sgd", "adam", "adamw", "adagrad"] = "adam"
    """Dense optimizer, from torch.optim."""
    lr: float = 1e-3
    """Learning rate of the dense parameters."""
    betas: tuple[float, float] = (0.9, 0.999)
    """The two averages of adam and adamw; other optimizers do not look at it."""
    eps: float | None = None
    """Added to the denominator; none = the optimizer's own."""
    weight_decay: float = 0.0
    """Weight decay; decoupled for adamw."""
    momentum: float = 0.0
    """Momentum of sgd."""
    warmup_steps: int = 0
    """Steps until the learning rate is reached."""
    decay: Decay = "none"
    """How the learning rate falls after warm-up."""
    decay_steps: int = 0
    """Steps from warm-up to `decay_to`; for inverse_sqrt the time scale."""
    decay_to: float = 0.0
    """Share of the learning rate at which decay ends."""
    dtype: Literal["float32", "float64"] = "float32"
    """Number format of the dense parameters."""

    def __post_init__(self) -> None:
        check_rates("dense", self)
        at_least("dense.weight_decay", self.weight_decay, 0)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"dense.momentum must be from 0 to below 1, not {self.momentum}")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"dense.momentum needs dense.optimizer = 'sgd', not '{self.optimizer}'")

    def rates(self) -> RateSchedule:
        return RateSchedule(self.warmup_steps, self.decay, self.decay_steps, self.decay_to)
