"""The iterator that `progress` was given, read on the data lane and split into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nestpipe.data.batch import Batch
from nestpipe.data.clustering import cluster


class BatchFeed:
    """One iterator at a time.  It is not asked again once it has ended: some iterators start over."""

    def __init__(self, features: Sequence[str], clustering: bool) -> None:
        self._features = list(features)
        self._clustering = clustering
        self.source: Iterator[Batch] | None = None
        self._exhausted = False

    def start(self, source: Iterator[Batch]) -> None:
        self.source = source

    def retry(self) -> None:
        """After a failed step the iterator may be asked again."""
        self._exhausted = False

    def end(self) -> None:
        """The data of every worker has ended; another iterator may follow."""
        self.source, self._exhausted = None, False

    def take(self, micro_batches: int) -> list[Batch]:
        """The micro-batches of the next batch; an empty list once the data has ended."""
        assert self.source is not None
        batch = None if self._exhausted else next(self.source, None)
        if batch is None:
            self._exhausted = True
            return []
        if not isinstance(batch, Batch):
            raise TypeError(f"the iterator must give nestpipe.Batch, not {type(batch).__name__}")
        parts = cluster(batch, micro_batches, self._features) if self._clustering else batch.split(micro_batches)
        return [part.with_shared_ids() for part in parts]

    def stop(self) -> None:
        """No batch after one that could not be loaded."""
        self._exhausted = True
