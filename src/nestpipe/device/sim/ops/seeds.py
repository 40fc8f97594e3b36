"""Random numbers on the device: drawn when issued, in the order of the issuing thread, whenever they may run."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import torch

from nestpipe.device.sim.ops.schemas import Facts, aten


class Seeds:
    """A seed and, for each host thread by name, how many operations have drawn from it."""

    def __init__(self) -> None:
        self.seed = 0
        self.drawn: dict[str, int] = {}

    def restart(self, seed: int) -> None:
        self.seed = seed
        self.drawn.clear()

    def draw(self) -> int:
        thread = threading.current_thread().name
        count = self.drawn.get(thread, 0)
        self.drawn[thread] = count + 1
        return random.Random(f"{self.seed} {thread} {count}").getrandbits(62)

    def state(self) -> torch.Tensor:
        """The seed and this thread's count."""
        count = self.drawn.get(threading.current_thread().name, 0)
        return torch.tensor([self.seed & (2**63 - 1), count]).view(torch.uint8)

    def set_state(self, state: torch.Tensor) -> None:
        """Other threads begin anew if the seed is another one."""
        seed, count = state.view(torch.int64).tolist()
        if seed != self.seed:
            self.restart(seed)
        self.drawn[threading.current_thread().name] = count


SEEDS = Seeds()


def seeded(func: Any, facts: Facts, args: list[Any], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """The operation with random numbers of its own, from a seed drawn now."""
    seed = SEEDS.draw()
    if func is aten.native_dropout.default:
        return lambda: _dropout(seed, *args)
    if facts.generator:
        return lambda: func(*args, **{**kwargs, "generator": torch.Generator().manual_seed(seed)})
    return lambda: _with_global_generator(seed, func, args, kwargs)


def _dropout(seed: int, values: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False or p == 0:
        return values.clone(), torch.ones_like(values, dtype=torch.bool)
    keep = torch.empty_like(values, dtype=torch.float32)
    mask = keep.bernoulli_(1 - p, generator=torch.Generator().manual_seed(seed)).bool()
    return values * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _with_global_generator(seed: int, func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        return func(*args, **kwargs)
    finally:
        torch.set_rng_state(before)
