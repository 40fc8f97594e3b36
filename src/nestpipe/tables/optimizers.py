"""Sparse optimizers: one step per touched row and batch, on the row's summed gradient, fused in one pass.

An optimizer is a frozen dataclass of its settings.  `state_width(dim)` is the number of state values per row; `apply`
steps all rows of a buffer (`ops/row_steps.py`).  Rows that a batch does not touch do not change, and neither do Adam's
moments ("lazy").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nestpipe.ops import row_steps
from nestpipe.ops.rows import Array


class SparseOptimizer(Protocol):
    """What a table needs of an optimizer.  Elementwise arithmetic in a fixed order makes it exact under every schedule."""

    @property
    def lr(self) -> float: ...

    def state_width(self, dim: int) -> int: ...

    def apply(self, values: Array, state: Array, grads: Array, lr: float, step: int) -> None:
        """Updates values [R, D] and state [R, S] in place from grads [R, D]: numpy arrays on the host, tensors on a device.

        The first `state_width(D)` columns of `state` are the optimizer's, all zero for a new row; columns behind them belong
        to eviction and staleness checks.  `lr` is this step's rate; `step` counts from 1.
        """
        ...


def _positive(optimizer: object, **fields: float) -> None:
    for name, value in fields.items():
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{type(optimizer).__name__}.{name} must be a finite number of at least 0, not {value}")


@dataclass(frozen=True)
class SGD:
    lr: float = 0.01

    def __post_init__(self) -> None:
        _positive(self, lr=self.lr)

    def state_width(self, dim: int) -> int:
        return 0

    def apply(self, values: Array, state: Array, grads: Array, lr: float, step: int) -> None:
        row_steps.sgd(values, grads, lr)


@dataclass(frozen=True)
class RowWiseAdagrad:
    """One accumulator per row: the mean squared gradient of the row, summed over steps (FBGEMM's definition)."""

    lr: float = 0.01
    eps: float = 1e-8
    moment_scale: float = 1.0
    """A factor on what each step adds to the accumulator.  Below 1 where replicas are averaged (`pipeline.replicas`)."""

    def __post_init__(self) -> None:
        _positive(self, lr=self.lr, eps=self.eps, moment_scale=self.moment_scale)

    def state_width(self, dim: int) -> int:
        return 1

    def apply(self, values: Array, state: Array, grads: Array, lr: float, step: int) -> None:
        row_steps.rowwise_adagrad(values, state, grads, lr, self.eps, self.moment_scale)


@dataclass(frozen=True)
class Adagrad:
    """Same as `torch.optim.Adagrad`."""

    lr: float = 0.01
    eps: float = 1e-10

    def __post_init__(self) -> None:
        _positive(self, lr=self.lr, eps=self.eps)

    def state_width(self, dim: int) -> int:
        return dim

    def apply(self, values: Array, state: Array, grads: Array, lr: float, step: int) -> None:
        row_steps.adagrad(values, state, grads, lr, self.eps)


@dataclass(frozen=True)
class Adam:
    """Same as `torch.optim.SparseAdam`: moments of touched rows only, bias correction by the number of steps taken."""

    lr: float = 0.001
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _positive(self, lr=self.lr, eps=self.eps)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"Adam.betas must each be in [0, 1), not {self.betas}")

    def state_width(self, dim: int) -> int:
        return 2 * dim

    def apply(self, values: Array, state: Array, grads: Array, lr: float, step: int) -> None:
        beta1, beta2 = self.betas
        step_size = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        row_steps.adam(values, state, grads, step_size, 1 - beta1, 1 - beta2, self.eps)


def with_moments(optimizer: SparseOptimizer, scale: float) -> RowWiseAdagrad:
    """Row-wise Adagrad whose sums of squares grow by another factor.  ValueError for any other optimizer."""
    if not isinstance(optimizer, RowWiseAdagrad):
        raise ValueError(
            f"pipeline.replicas = 'average' cannot be used with {type(optimizer).__name__}: set tables.optimizer = "
            "'rowwise_adagrad' (RowWiseAdagrad), or pipeline.replicas = 'exact'"
        )
    return replace(optimizer, moment_scale=scale * optimizer.moment_scale)


OPTIMIZERS: dict[str, type[Any]] = {"sgd": SGD, "rowwise_adagrad": RowWiseAdagrad, "adagrad": Adagrad, "adam": Adam}
"""By the names that `tables.optimizer` of a recipe takes.  To add one: its class here, its name in `config.tables`."""
