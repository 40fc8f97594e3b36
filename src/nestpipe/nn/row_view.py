"""What a collection needs from whoever holds its rows: a training pipeline, a server, or tables in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.ops.rows import Array
from nestpipe.tables.group import TableGroup


class RowView(Protocol):
    """The rows of the ids that one micro-batch looks up, each once, group by group."""

    @property
    def features(self) -> KeyedJaggedTensor | None:
        """The features whose ids were looked up, where the collection has to be given these and no others."""

    @property
    def shares_rows(self) -> bool:
        """Whether `rows` holds rows of other micro-batches too."""

    def rows(self, group: int) -> tuple[Tensor, Tensor | None]:
        """Rows [U, D] of a group, and the array that sums their gradients; None where nothing is trained."""

    def index(self, group: int, first: int, stop: int) -> Array:
        """Places in `rows` of the ids of lookups first..stop-1 of a group, lookup after lookup."""

    def used_rows(self, group: int, lookups: Sequence[int]) -> tuple[Array, list[Array]]:
        """The places in `rows` that these lookups use, each once; and for each lookup, every id's place among them."""

    def arrived(self, group: int) -> int:
        """How many rows of a group, counted from the front, this micro-batch may read."""


class RowSource(Protocol):
    """Looks rows up for a collection that is called outside a pipeline's step."""

    @property
    def groups(self) -> Sequence[TableGroup]: ...

    def view(self, features: KeyedJaggedTensor) -> RowView:
        """The current rows of these ids.  Creates and trains nothing."""
