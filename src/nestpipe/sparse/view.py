"""One micro-batch of a batch context, as the model's collections see it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.sparse.batch_context import BatchContext
from nestpipe.sparse.routing import Routes


@dataclass(frozen=True)
class MicroBatchView:
    """A `nn.row_view.RowView` of rows that have arrived in the windows of a batch."""

    context: BatchContext
    micro: int
    trains: bool

    @property
    def features(self) -> KeyedJaggedTensor | None:
        return self.context.micros[self.micro].sparse_features

    @property
    def shares_rows(self) -> bool:
        return len(self.context.micros) > 1

    def rows(self, group: int) -> tuple[Tensor, Tensor | None]:
        room = self.context.windows[group].of(self.micro)
        return room.rows, room.grads if self.trains else None

    def index(self, group: int, first: int, stop: int) -> np.ndarray:
        ends = self.context.ends[group]
        flat, at = ends.reshape(-1), self.micro * ends.shape[1]
        begin = int(flat[at + first - 1]) if at + first else 0
        index = self._routes.windows[group].inverse[begin : int(flat[at + stop - 1])]
        first_row = self.context.windows[group].of(self.micro).begin
        return index - np.int32(first_row) if first_row else index

    def arrived(self, group: int) -> int:
        begin = self.context.windows[group].of(self.micro).begin
        return self._routes.windows[group].arrived(self.micro) - begin

    @property
    def _routes(self) -> Routes:
        assert self.context.routes is not None
        return self.context.routes
