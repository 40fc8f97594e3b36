"""Products with a layer's weight on the host, at widths that its vector registers divide.

A layer of 415 inputs runs at 80 to 90 % of the speed of one with 416 (docs/log.md), so large weights of such a width get columns
of zeros for as long as a product takes.  Results are the layer's own but for rounding, and depend on shapes alone: every schedule
rounds alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

LANES = 8
"""Numbers of a register."""
NARROW = 16
"""Weights of fewer columns are multiplied the other way round."""
LARGE, MANY = 1 << 16, 64
"""Numbers of a weight, and rows that meet it, from which on it is worth a copy."""


def is_worth_widening(weight: Tensor, rows: int) -> bool:
    uneven = weight.shape[1] % LANES != 0 and weight.shape[1] > NARROW
    return uneven and weight.numel() >= LARGE and rows >= MANY and weight.device.type == "cpu"


def widened(matrix: Tensor) -> Tensor:
    """With columns of zeros up to the next width that a register divides."""
    return functional.pad(matrix, (0, -matrix.shape[1] % LANES))


def add_weight_products(total: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """total [out, in] += grad.T @ input, one after another, of every (grad [n, out], input [n, in])."""
    if is_worth_widening(total, sum(grad.shape[0] for grad, _ in pairs)):
        wide = widened(total)
        for grad, input in pairs:
            wide.addmm_(grad.t(), widened(input))
        total.copy_(wide[:, : total.shape[1]])
    elif total.shape[1] < NARROW and total.device.type == "cpu":
        for grad, input in pairs:  # the long side last: a third of the time
            total.add_((input.t() @ grad).t())
    else:
        for grad, input in pairs:
            total.addmm_(grad.t(), input)
