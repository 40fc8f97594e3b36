"""What a model's constructor asks of its training data, kept in an export so that a server needs no data."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nestpipe.data.batch import Batch
from nestpipe.data.source import DataError, Source
from nestpipe.infer.serving_files import DataShape


class ShapedSource:
    """A `Source` without samples.  It has a `catalogue` if the data had one."""

    def __init__(self, shape: DataShape, catalogue: np.ndarray | None) -> None:
        self.extent, self.piece = 0, 1
        self.features, self.dense_features, self.longest = shape.features, shape.dense_features, shape.longest
        if catalogue is not None:
            self.catalogue = catalogue

    def read(self, start: int, stop: int, epoch: int) -> Iterator[tuple[Batch, np.ndarray]]:
        raise DataError("an export for serving has no samples: give --data")


def shape_of(source: Source) -> tuple[DataShape, np.ndarray | None]:
    """The shape of a source, and its catalogue if it has one."""
    catalogue = getattr(source, "catalogue", None)
    longest = int(getattr(source, "longest", 0))
    shape = DataShape(list(source.features), int(source.dense_features), longest)
    return shape, None if catalogue is None else np.ascontiguousarray(catalogue, np.int64)
