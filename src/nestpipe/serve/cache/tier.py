"""The tier behind the arena: the same blocks, as they are or rounded to half the bytes."""

from __future__ import annotations

import numpy as np
import torch

from nestpipe.config.serving import TierDtype
from nestpipe.serve.cache.arena import Arena

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Tier:
    """Slots that blocks are stored into and loaded from.  float32 gives back the same bits."""

    def __init__(self, budget: int, block_floats: int, dtype: TierDtype = "float32") -> None:
        self._dtype = _DTYPES[dtype]
        self.arena = Arena(budget, block_floats * self._dtype.itemsize)

    def store(self, block: np.ndarray) -> int | None:
        """The slot that now has a copy of the block; None where there is no room."""
        slot = self.arena.take()
        if slot is not None:
            self._tensor(slot).copy_(torch.from_numpy(block))
        return slot

    def load(self, slot: int, block: np.ndarray) -> None:
        """Copies a slot into a block, and frees the slot."""
        torch.from_numpy(block).copy_(self._tensor(slot))
        self.arena.give_back(slot)

    def _tensor(self, slot: int) -> torch.Tensor:
        return torch.from_numpy(self.arena.view(slot, np.uint8)).view(self._dtype)
