"""What inference is made of: a history, a model that ranks on cached blocks of it, and rows from wherever they lie.

Every call is pure: the same arguments give the same bits, in any order, in any process on a machine, whatever was computed
before.  All compute releases the GIL and runs on one thread.  Full inference is `encode_block` for every complete block into
scratch memory, then `open`, then `score`: the same code as on a cache, so every path has the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class History:
    """What a request says of a user: arrays of one length, the oldest event first."""

    items: np.ndarray
    """int64 [n]"""
    actions: np.ndarray
    """int32 [n], a bit per action of the model"""
    times: np.ndarray
    """int64 [n], seconds, ascending"""
    start: int = 0
    """Index of the first event here in the user's whole history: anchors count from there."""
    context: Mapping[str, np.ndarray] = field(default_factory=dict)
    """int64 [n] by name, for models with context features.  One that is missing is 0 for every event."""

    def __len__(self) -> int:
        return len(self.items)


class RowReader(Protocol):
    """Rows of tables, read-only."""

    dim: int

    def read(self, table: str, keys: np.ndarray) -> np.ndarray:
        """int64 [k] -> float32 [k, dim].  A key without a row gets the initial value that training would give it."""
        ...


class Ranking(Protocol):
    """A request's history, encoded to its end."""

    def score(self, candidates: np.ndarray) -> np.ndarray:
        """int64 [m] -> logits, float32 [m, actions].  Any m; any split of the candidates gives the same bits."""
        ...


class RelayModel(Protocol):
    """A ranking model whose histories are encoded block by block.  Histories are windowed, except `window`'s own."""

    version: str
    """Of the checkpoint: unique per weights."""
    actions: tuple[str, ...]
    """Heads: the columns of scores."""
    max_length: int
    block: int
    """Tokens of a block: the fixed grid."""
    block_floats: int
    """float32 numbers that a block's keys and values take, of all layers."""

    def window(self, history: History) -> History:
        """The last events, from a multiple of a stride on, so that the window moves rarely.  Places count from its start."""
        ...

    def complete_blocks(self, history: History) -> int:
        """How many blocks no later event can change: a block is complete when the event after it is known."""
        ...

    def encode_block(self, history: History, index: int, blocks: Sequence[np.ndarray]) -> None:
        """Computes blocks[index] (float32 [block_floats], 64-byte aligned) from the history and blocks[:index]."""
        ...

    def open(self, history: History, now: int, blocks: Sequence[np.ndarray]) -> Ranking:
        """Computes what stands behind the complete blocks, which are all given, at the time of the request."""
        ...
