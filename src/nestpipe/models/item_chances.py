"""The chance of every item to be drawn as a negative: what logits are corrected by (log q)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn


class ItemChances(nn.Module):
    """Logarithms of chances by item.

    They move with the model but are no buffers: the data gives them, so checkpoints and digests need not hold them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.items = torch.zeros(1, dtype=torch.int64)
        self.log_chances = torch.zeros(1)

    def set(self, items: np.ndarray, log_chances: np.ndarray | None) -> None:
        """`items` ascending, and the logarithm of each one's chance.  None: all alike, so that nothing is corrected."""
        if log_chances is None:
            items, log_chances = np.zeros(1, np.int64), np.zeros(1)
        if len(items) != len(log_chances) or not len(items) or not (np.diff(items) > 0).all():
            raise ValueError("chances belong to items in ascending order, one each")
        self.items = torch.tensor(items, dtype=torch.int64, device=self.items.device)
        self.log_chances = torch.tensor(log_chances).to(self.log_chances)

    def forward(self, ids: Tensor) -> Tensor:
        """Of each id.  An id that is no item counts as the rarest item."""
        place = torch.searchsorted(self.items, ids).clamp_(max=self.items.numel() - 1)
        return torch.where(self.items[place] == ids, self.log_chances[place], self.log_chances.min())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ItemChances:
        super()._apply(fn, recurse)
        self.items, self.log_chances = fn(self.items), fn(self.log_chances)
        return self
