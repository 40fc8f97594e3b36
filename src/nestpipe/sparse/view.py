"""One micro-batch of a batch context, as the model's collections see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor

from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.device.backend import Array, Device
from nestpipe.ops import pooling_kernels
from nestpipe.sparse.batch_context import BatchContext
from nestpipe.sparse.routing import Routes


@dataclass(frozen=True)
class MicroBatchView:
    """A `nn.row_view.RowView` of rows that have arrived in the windows of a batch."""

    context: BatchContext
    micro: int
    trains: bool
    device: Device

    @property
    def features(self) -> KeyedJaggedTensor | None:
        return self.context.moved[self.micro].sparse_features

    @property
    def shares_rows(self) -> bool:
        return len(self.context.micros) > 1

    def rows(self, group: int) -> tuple[Tensor, Tensor | None]:
        """Only rows that have arrived: those behind them are being written while this micro-batch computes."""
        part = self.context.windows[group].of(self.micro)
        return part.row_tensor[: self.arrived(group)], part.grad_tensor if self.trains else None

    def index(self, group: int, first: int, stop: int) -> Array:
        return self._places(group, first, stop, self.context.lists[group].inverse)

    def used_rows(self, group: int, lookups: Sequence[int]) -> tuple[Array, list[Array]]:
        """On a device, the host finds them: how many there are is known nowhere else."""
        windows = self._routes.windows
        indexes = [self._places(group, lookup, lookup + 1, windows[group].inverse) for lookup in lookups]
        number_of = np.full(len(windows[group]), -1, np.int32)
        used, inverse = pooling_kernels.compact(np.concatenate(indexes), number_of)
        used, inverse = self.device.upload([used, inverse])
        ends = np.cumsum([0, *(len(index) for index in indexes)]).tolist()
        return used, [inverse[begin:end] for begin, end in pairwise(ends)]

    def _places(self, group: int, first: int, stop: int, inverse: Array) -> Array:
        ends = self.context.ends[group]
        flat, at = ends.reshape(-1), self.micro * ends.shape[1]
        begin = int(flat[at + first - 1]) if at + first else 0
        index = inverse[begin : int(flat[at + stop - 1])]
        first_row = self.context.windows[group].of(self.micro).begin
        return index - np.int32(first_row) if first_row else index

    def arrived(self, group: int) -> int:
        begin = self.context.windows[group].of(self.micro).begin
        return self._routes.windows[group].arrived(self.micro) - begin

    @property
    def _routes(self) -> Routes:
        assert self.context.routes is not None
        return self.context.routes
