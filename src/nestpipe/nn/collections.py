"""The collections that a model holds: `EmbeddingBagCollection` (pooled) and `EmbeddingCollection` (id by id).

A collection has no parameters: its rows live in tables, and it reads them through a `RowView`.  Inside a `TrainPipeline` the rows
of the current micro-batch have arrived before the model runs.  Outside a step (evaluation, a notebook) a collection looks up at
once: in the pipeline's tables, or in tables of its own if it belongs to no pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from nestpipe.data.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from nestpipe.nn.local_rows import LocalRows
from nestpipe.nn.lookups import GroupLookups
from nestpipe.nn.row_view import RowSource, RowView
from nestpipe.ops.pooling import Bags, GatherRows, GatherUniqueRows, PoolRows
from nestpipe.ops.rows import Array
from nestpipe.tables.config import EmbeddingBagConfig, EmbeddingConfig, TableConfig
from nestpipe.tables.group import group_tables
from nestpipe.tables.optimizers import SGD, SparseOptimizer

Config = TypeVar("Config", bound=TableConfig)


@dataclass(frozen=True)
class UniqueRows:
    """The rows of a feature without repetition: id i of the feature is rows[index[i]].  Features of one group share `rows`.

    Use `rows` through `index` only: others may be of features that somebody else looks up.
    """

    rows: Tensor
    index: Tensor
    feature: JaggedTensor

    @property
    def lengths(self) -> Tensor:
        return self.feature.lengths()


class Collection(nn.Module, Generic[Config]):
    """What the two collections share: their tables, and the view of the current micro-batch."""

    def __init__(self, tables: Sequence[Config]) -> None:
        super().__init__()
        if not tables:
            raise ValueError(f"{type(self).__name__} needs at least one table")
        self.tables = list(tables)
        names = [table.name for table in self.tables]
        if len(set(names)) != len(names):
            raise ValueError(f"{type(self).__name__}: two tables have one name: {', '.join(names)}")
        pairs = [(table, feature) for table in self.tables for feature in table.feature_names]
        features = [feature for _, feature in pairs]
        self.lookups: list[tuple[Config, str, str]] = [
            (t, f, f if features.count(f) == 1 else f"{f}@{t.name}") for t, f in pairs
        ]
        """(table, feature, name of the output): a feature that looks into several tables is called feature@table."""
        if len({name for _, _, name in self.lookups}) != len(self.lookups):
            raise ValueError(f"{type(self).__name__}: a table lists a feature twice: {features}")
        self._anchors: dict[torch.device, Tensor] = {}
        """Empty tensors that make autograd call the backward pass of a lookup, by device."""
        self._source: RowSource | None = None
        self._view: RowView | None = None
        self._places: list[tuple[int, int]] = []
        """(group, lookup number in it) of every entry of `lookups`."""

    def attach(self, source: RowSource, places: list[tuple[int, int]]) -> None:
        """From now on rows come from `source`; `places` are the group of each lookup and its number in that group."""
        self._source, self._places = source, places

    def look_at(self, view: RowView | None) -> None:
        """Called by the pipeline before and after the model runs on a micro-batch."""
        self._view = view

    def _anchor(self, rows: Tensor) -> Tensor:
        if rows.device not in self._anchors:
            self._anchors[rows.device] = torch.zeros(0, requires_grad=True, device=rows.device)
        return self._anchors[rows.device]

    def _current(self, features: KeyedJaggedTensor) -> RowView:
        view = self._view
        if view is None:
            if self._source is None:
                lookups, (places,) = place_lookups([self], SGD())
                self.attach(LocalRows(lookups), places)
            assert self._source is not None
            return self._source.view(features)
        routed = view.features
        if routed is not None and features is not routed and not _same_ids(features, routed):
            raise ValueError(
                f"{type(self).__name__} was given features that were not routed for this batch: inside a pipeline pass "
                "batch.sparse_features as it is, and change ids where the batch is loaded"
            )
        return view


class EmbeddingBagCollection(Collection[EmbeddingBagConfig]):
    """Pools the rows of each sample's ids by sum or mean.  KeyedJaggedTensor in, KeyedTensor [B, sum of dims] out."""

    def attach(self, source: RowSource, places: list[tuple[int, int]]) -> None:
        super().attach(source, places)
        self._dims = [table.embedding_dim for table, _, _ in self.lookups]
        self._names = [name for _, _, name in self.lookups]
        columns = np.cumsum([0, *self._dims])
        self._parts: list[_GroupPart] = []
        self._known_keys: list[str] = []
        self._known_places: dict[int, list[int]] = {}
        for group in sorted({g for g, _ in places}):
            mine = [i for i, (g, _) in enumerate(places) if g == group]
            self._parts.append(
                _GroupPart(
                    group,
                    places[mine[0]][1],
                    [self.lookups[i][1] for i in mine],
                    np.array([self.lookups[i][0].pooling == "mean" for i in mine]),
                    columns[mine],
                )
            )
        if len({source.groups[part.group].dtype for part in self._parts}) > 1:
            raise ValueError(
                "the tables of one EmbeddingBagCollection must have one dtype: use one collection per dtype"
            )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        view = self._current(features)
        groups: list[Bags] = []
        weights: list[Tensor | None] = []
        given = features.weights_or_none()
        for part in self._parts:
            rows, grads = view.rows(part.group)
            index = view.index(part.group, part.first, part.first + len(part.features))
            places = self._feature_places(part, features)
            lengths = _of_features(features, features.lengths(), places, by_value=False)
            groups.append(Bags(rows, grads, index, lengths, part.means, part.columns))
            weights.append(None if given is None else _of_features(features, given, places, by_value=True))
        given_weights = [w for w in weights if w is not None]
        shape = (features.stride(), sum(self._dims))
        return KeyedTensor(
            self._names,
            self._dims,
            PoolRows.apply(self._anchor(groups[0].rows), weights, groups, shape, *given_weights),
        )

    def _feature_places(self, part: _GroupPart, features: KeyedJaggedTensor) -> list[int]:
        """Where a part's features stand; batch after batch has them in one order, so the last answer is mostly this one's."""
        if self._known_keys is not features.keys() and self._known_keys != features.keys():
            self._known_keys, self._known_places = list(features.keys()), {}
        if part.group not in self._known_places:
            self._known_places[part.group] = features.places(part.features)
        return self._known_places[part.group]


@dataclass(frozen=True)
class _GroupPart:
    """What a collection looks up in one group: its lookups there, one after another, and where they go in the output."""

    group: int
    first: int
    features: list[str]
    means: np.ndarray
    columns: np.ndarray


class EmbeddingCollection(Collection[EmbeddingConfig]):
    """The row of every id, in order.  KeyedJaggedTensor in, a JaggedTensor of vectors per feature out."""

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        view = self._current(features)
        out = {}
        for (_, feature, name), (group, lookup) in zip(self.lookups, self._places):
            rows, grads = view.rows(group)
            values = GatherRows.apply(self._anchor(rows), rows, grads, view.index(group, lookup, lookup + 1))
            part = features[feature]
            out[name] = JaggedTensor(values, part.weights_or_none(), lengths=part.lengths(), offsets=part.offsets())
        return out

    def unique_rows(self, features: KeyedJaggedTensor) -> dict[str, UniqueRows]:
        """As calling it, but each row once and an index into them: for features with many repeated ids, such as negatives."""
        view = self._current(features)
        rows_of: dict[int, Tensor] = {}
        index_of: dict[tuple[int, int], Array] = {}
        for group in {group for group, _ in self._places}:
            lookups = [lookup for g, lookup in self._places if g == group]
            rows, grads = view.rows(group)
            if view.shares_rows:  # most rows of the window belong to other micro-batches
                used, indexes = view.used_rows(group, lookups)
                rows_of[group] = GatherRows.apply(self._anchor(rows), rows, grads, used)
            else:
                indexes = [view.index(group, lookup, lookup + 1) for lookup in lookups]
                rows_of[group] = GatherUniqueRows.apply(self._anchor(rows), rows, grads, view.arrived(group))
            index_of |= {(group, lookup): index for lookup, index in zip(lookups, indexes)}
        return {
            name: UniqueRows(rows_of[place[0]], torch.as_tensor(index_of[place]), features[feature])
            for (_, feature, name), place in zip(self.lookups, self._places)
        }


def _same_ids(features: KeyedJaggedTensor, routed: KeyedJaggedTensor) -> bool:
    """Whether it is the routed ids that are looked up, perhaps with other weights.  Ids are compared by where they lie."""
    return (
        features.keys() == routed.keys()
        and features.values().data_ptr() == routed.values().data_ptr()
        and torch.equal(features.lengths_on_host(), routed.lengths_on_host())
    )


def _of_features(features: KeyedJaggedTensor, of: Tensor, places: list[int], by_value: bool) -> Tensor:
    """What of `lengths` (or, by value, of `weights`) belongs to these features, one after another; no copy where it is so."""
    samples = features.stride()
    first, after = places[0], places[-1] + 1
    side_by_side = after - first == len(places) and places == list(range(first, after))
    if not by_value and side_by_side:
        return of[samples * first : samples * after]
    ends = (
        features.offsets_on_host()[::samples].tolist()
        if by_value and samples
        else [samples * f for f in range(max(places) + 2)]
    )
    if side_by_side:
        return of[ends[first] : ends[after]]
    return torch.cat([of[ends[f] : ends[f + 1]] for f in places])


def collections_in(model: nn.Module) -> list[Collection[TableConfig]]:
    return [module for module in model.modules() if isinstance(module, Collection)]


def place_lookups(
    collections: Sequence[Collection[Config]], default_optimizer: SparseOptimizer, stamped: bool = False
) -> tuple[list[GroupLookups], list[list[tuple[int, int]]]]:
    """Groups the tables of all collections.  Returns the lookups of each group, and the places to attach each collection to.

    `stamped`: rows carry the number of the batch that trained them last.
    """
    groups = group_tables([table for c in collections for table in c.tables], default_optimizer, stamped)
    features: list[list[str]] = [[] for _ in groups]
    numbers: list[list[int]] = [[] for _ in groups]
    place = {table.name: (g, n) for g, group in enumerate(groups) for n, table in enumerate(group.tables)}
    places: list[list[tuple[int, int]]] = []
    for collection in collections:
        mine = []
        for table, feature, _ in collection.lookups:
            g, number = place[table.name]
            mine.append((g, len(features[g])))
            features[g].append(feature)
            numbers[g].append(number)
        places.append(mine)
    lookups = [GroupLookups(g, tuple(f), np.array(n, np.uint16)) for g, f, n in zip(groups, features, numbers)]
    return lookups, places
