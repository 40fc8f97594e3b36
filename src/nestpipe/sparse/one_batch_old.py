"""`serial` that reads what `semi_async` reads: rows of the batch before as they were before its update.

It keeps the values of a whole batch, and knows nothing of peeking, of buffers or of other lanes: the plain meaning of "stale by
one batch", to compare with.
"""

from __future__ import annotations

from collections.abc import Callable

from nestpipe.device.backend import Array, Device
from nestpipe.keys.dedup import intersect_pairs
from nestpipe.ops import rows
from nestpipe.sparse.batch_context import BatchContext

StageFunction = Callable[[BatchContext, int], None]


class OneBatchOld:
    """Stands in for `embed` and `update` of a serial pipeline."""

    def __init__(self, embed: StageFunction, update: StageFunction, device: Device) -> None:
        self._embed, self._update, self._device = embed, update, device
        self._last: tuple[BatchContext, list[Array]] | None = None

    def forget(self) -> None:
        """The next batch reads fresh rows: after a checkpoint, or when the data has ended."""
        self._last = None

    def update(self, context: BatchContext, micro: int) -> None:
        self._last = context, [_copy(buffer.values) for buffer in context.buffers]
        self._update(context, micro)

    def embed(self, context: BatchContext, micro: int) -> None:
        if self._last is None:
            self._embed(context, micro)
            return
        before, values = self._last
        assert before.routes is not None and context.routes is not None
        newest = [buffer.outgoing for buffer in context.buffers]
        for buffer, old, theirs, mine in zip(context.buffers, values, before.routes.owned, context.routes.owned):
            pair = intersect_pairs(theirs.tables, theirs.keys, mine.tables, mine.keys)
            places, here = self._device.upload(list(pair))
            buffer.outgoing = _copy(buffer.outgoing)
            rows.copy_rows(old, places, buffer.outgoing, here)
        self._embed(context, micro)
        for buffer, outgoing in zip(context.buffers, newest):
            buffer.outgoing = outgoing


def _copy(values: Array) -> Array:
    return values.clone() if hasattr(values, "clone") else values.copy()
