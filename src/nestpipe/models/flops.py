"""How many FLOPs next-item models need, by formula, in two conventions.

One token costs 2 FLOPs for each weight of the linear layers, one pair of places 2 FLOPs for each of the products that it is
part of and each number of a token's width.  The backward pass costs twice the forward pass.  Making scores again in it is
work, but no FLOPs of the model's.  Item vectors and the loss are not counted.

  jagged   the tokens that there are, and the pairs of places that look back: n (n + 1) / 2 of a history of n
  padded   every history as long as the longest allowed, and all n^2 pairs: what published figures count.  Operators that
           skip padding and masked pairs can pass 100 % of a machine's peak in it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

PASSES = 3
"""Forward, and backward at twice its cost."""


@dataclass
class Trained:
    """What a model has been trained on."""

    samples: int = 0
    tokens: int = 0
    pairs: int = 0
    """Of places that look back, themselves included."""

    def add(self, lengths: Tensor) -> None:
        """Lengths of histories, on the host."""
        lengths = lengths.to(torch.int64)
        self.samples += lengths.numel()
        self.tokens += int(lengths.sum())
        self.pairs += int((lengths * (lengths + 1) // 2).sum())


@dataclass(frozen=True)
class Cost:
    """What a model's blocks do for a token and for a pair of places, forward."""

    weights: int
    """Of linear layers."""
    products: int
    """That a pair is part of, times the width of a token, over all blocks."""
    longest: int
    """Places of a padded history."""

    def jagged(self, trained: Trained) -> int:
        return PASSES * 2 * (self.weights * trained.tokens + self.products * trained.pairs)

    def of_history(self) -> tuple[float, float, float]:
        """(a, b, c): a history of n tokens needs a + b n + c n^2 FLOPs."""
        return 0.0, PASSES * (2.0 * self.weights + self.products), PASSES * float(self.products)

    def padded(self, trained: Trained) -> int:
        return PASSES * 2 * trained.samples * (self.weights * self.longest + self.products * self.longest**2)


def matrix_weights(module: nn.Module) -> int:
    """Numbers in the matrices of a module."""
    return sum(p.numel() for p in module.parameters() if p.dim() == 2)


def measured_peak(device: torch.device, size: int = 1024, rounds: int = 6) -> float:
    """FLOPs a second of a large product of float32 matrices on the host: the best of some rounds.  0 on other devices."""
    if device.type != "cpu":
        return 0.0
    a, out = torch.ones(size, size), torch.empty(size, size)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        torch.mm(a, a, out=out)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
