"""Tables of a collection that belongs to no pipeline: in this process, every row at its first value unless it was set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.keys.window import Window
from nestpipe.nn.lookups import GroupLookups
from nestpipe.tables.keyed import KeyedRows
from nestpipe.tables.store import make_store


class LocalRows:
    """A `RowSource` over stores in this process."""

    def __init__(self, lookups: Sequence[GroupLookups], seed: int = 0) -> None:
        self._lookups = list(lookups)
        self.groups = [one.group for one in lookups]
        self.stores: list[KeyedRows] = [make_store(group, seed, rank=0, tier=None) for group in self.groups]

    def view(self, features: KeyedJaggedTensor) -> LocalView:
        plans = [lookups.plan([Batch(features)], workers=1) for lookups in self._lookups]
        rows = [_read(store, window) for store, (window, _) in zip(self.stores, plans)]
        return LocalView([window for window, _ in plans], [ends for _, ends in plans], rows)


@dataclass(frozen=True)
class LocalView:
    """One batch, looked up at once."""

    windows: list[Window]
    ends: list[np.ndarray]
    values: list[Tensor]
    features: None = None
    shares_rows: bool = False

    def rows(self, group: int) -> tuple[Tensor, None]:
        return self.values[group], None

    def index(self, group: int, first: int, stop: int) -> np.ndarray:
        ends = self.ends[group].reshape(-1)
        return self.windows[group].inverse[int(ends[first - 1]) if first else 0 : int(ends[stop - 1])]

    def used_rows(self, group: int, lookups: Sequence[int]) -> tuple[np.ndarray, list[np.ndarray]]:
        """All rows: those of a batch that is looked up by itself are its own."""
        indexes = [self.index(group, lookup, lookup + 1) for lookup in lookups]
        return np.arange(self.arrived(group), dtype=np.int32), indexes

    def arrived(self, group: int) -> int:
        return len(self.windows[group])


def _read(store: KeyedRows, window: Window) -> Tensor:
    group = store.group
    values = np.empty((len(window), group.dim), group.dtype)
    state = np.empty((len(window), group.state_width), group.dtype)
    store.retrieve(window.tables, window.keys, values, state)
    return torch.from_numpy(values)
