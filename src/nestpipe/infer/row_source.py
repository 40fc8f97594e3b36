"""A model's collections on rows that are read and never trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.data.batch import Batch
from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.infer.contract import RowReader
from nestpipe.keys.window import Window
from nestpipe.nn.collections import collections_in, place_lookups
from nestpipe.nn.local_rows import LocalView
from nestpipe.nn.lookups import GroupLookups
from nestpipe.tables.config import TableConfig
from nestpipe.tables.group import TableGroup
from nestpipe.tables.optimizers import SGD


class ReadRows:
    """A `RowSource` on a `RowReader`."""

    def __init__(self, lookups: Sequence[GroupLookups], reader: RowReader) -> None:
        self._lookups = list(lookups)
        self.groups = [one.group for one in lookups]
        self._reader = reader

    def view(self, features: KeyedJaggedTensor) -> LocalView:
        plans = [lookups.plan([Batch(features)], workers=1) for lookups in self._lookups]
        rows = [self._read(group, window) for group, (window, _) in zip(self.groups, plans)]
        return LocalView([window for window, _ in plans], [ends for _, ends in plans], rows)

    def _read(self, group: TableGroup, window: Window) -> Tensor:
        if len(group.tables) == 1:
            return torch.from_numpy(self._reader.read(group.tables[0].name, window.keys))
        values = np.empty((len(window), group.dim), group.dtype)
        order = np.argsort(window.tables, kind="stable")
        ends = np.searchsorted(window.tables[order], np.arange(len(group.tables) + 1))
        for number in np.flatnonzero(np.diff(ends)):
            mine = order[ends[number] : ends[number + 1]]
            values[mine] = self._reader.read(group.tables[number].name, window.keys[mine])
        return torch.from_numpy(values)


def tables_of(model: nn.Module) -> list[TableConfig]:
    return [table for collection in collections_in(model) for table in collection.tables]


def attach_reader(model: nn.Module, reader: RowReader) -> None:
    """From now on the model's collections take their rows from the reader."""
    collections = collections_in(model)
    # The optimizer decides which tables form a group, and so what is read together; never a value.
    lookups, places = place_lookups(collections, SGD())
    source = ReadRows(lookups, reader)
    for collection, mine in zip(collections, places):
        collection.attach(source, mine)
