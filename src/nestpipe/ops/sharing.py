"""Negatives that positions of one history share: each position also counts the negatives of others.

Only positions of the same history share.  A history is never cut into micro-batches or between workers, so the loss is
the same for any number of either, and nothing is sent.  A history of n positions shares with the min(factor, n) - 1
positions that are about n / factor places apart; which ones depends on n alone.  Negatives are drawn anew in every
epoch, so what is shared is new every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nestpipe.data.jagged import JaggedTensor

LOGITS, NEGATIVES = "logits", "negatives"


@dataclass(frozen=True)
class Sharing:
    """Who shares with whom, for the positions of all histories of a batch, one after another."""

    kind: str
    """"logits": the other position's logits as they are, of its own query.  "negatives": this position's query with the
    other's negatives."""
    others: Tensor
    """[factor - 1, n]: another position of the same history."""
    counts: Tensor
    """[factor - 1, n]: False where the history is too short to have another one."""


def share(kind: str, factor: int, histories: JaggedTensor) -> Sharing:
    """Sharing among `factor` positions of each history, its own negatives included."""
    if kind not in (LOGITS, NEGATIVES) or factor < 2:
        raise ValueError(
            f"sharing is of 'logits' or 'negatives' by a factor of at least 2, not of {kind!r} by {factor}"
        )
    sample, place = histories.places()
    length, start = histories.lengths()[sample], histories.offsets()[sample]
    turn = torch.arange(1, factor, device=place.device)[:, None]
    # n / factor places apart; in a history shorter than that, one place apart, as often as there are others
    distance = torch.maximum(turn, turn * length // factor)
    return Sharing(kind, start + (place + distance) % length, turn < length)
