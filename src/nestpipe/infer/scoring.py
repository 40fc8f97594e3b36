"""What scores of a model are, by what its data and its outputs are.  Evaluation in training and prediction share it.

- On sequences (a source with a `catalogue`), for a model that names its item `table`: outputs are a query [B, n] for each
  sample; an item scores the product of query and vector.  Vectors are the table's rows, or what the model's
  `item_vectors(rows)` makes of them.
- Otherwise: one number for each sample, a logit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.data.batch import Batch
from nestpipe.data.source import Source


def ranks_items(model: nn.Module, source: Source) -> bool:
    """Whether this model ranks the items of this source."""
    table = getattr(model, "table", None)
    return isinstance(table, str) and hasattr(source, "catalogue") and {"history", "target"} <= set(source.features)


def item_vectors(model: nn.Module, rows: Tensor) -> Tensor:
    """What queries are multiplied with, from the rows of items."""
    make: Any = getattr(model, "item_vectors", None)
    if make is None:
        return rows
    with torch.no_grad():
        vectors: Tensor = make(rows)
    return vectors


def check_queries(batch: Batch, queries: object, items: Tensor) -> None:
    """ValueError unless a model's outputs are a query for each sample that fits the items' vectors."""
    if not isinstance(queries, Tensor) or queries.shape != (len(batch), items.shape[1]):
        raise ValueError(
            f"to rank items, the model must return a query of {items.shape[1]} numbers for each sample, not "
            + (f"{tuple(queries.shape)}" if isinstance(queries, Tensor) else f"a {type(queries).__name__}")
            + "; without an attribute table it is evaluated by its loss"
        )


class _Head:
    """The first samples of a source whose units are samples."""

    def __init__(self, source: Source, extent: int) -> None:
        self.source = source
        self.extent = extent
        self.piece = source.piece
        self.features = source.features
        self.dense_features = source.dense_features
        self.read = source.read


def first_samples(source: Source, samples: int | None) -> Source:
    return source if samples is None or samples >= source.extent else _Head(source, samples)
