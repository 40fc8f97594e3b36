"""What no schedule can be faster than: a step that only computes, and one that only sends and receives.

Both train nonsense, on purpose.  A pipeline that something was left out of is for measuring, and then to be closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from nestpipe.comm.exchange import Exchange
from nestpipe.keys.index import Found
from nestpipe.sparse.batch_context import BatchContext
from nestpipe.tables.store import RowStore

if TYPE_CHECKING:
    from nestpipe.pipeline.pipeline import TrainPipeline

A_VALUE = 0.01
"""Of every row where there are no tables: not zero, which a model may want to divide by."""


class SilentExchange(Exchange):
    """Says nothing to anybody, and hears zeros."""

    def exchange(self, sends: Sequence[Sequence[torch.Tensor]], receives: Sequence[Sequence[torch.Tensor]]) -> None:
        for tensors in receives:
            for tensor in tensors:
                tensor.zero_()

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> None:
        pass


class NoRows(RowStore):
    """Has every key, at once and with the same row, and keeps nothing."""

    def retrieve(
        self,
        tables: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        state: np.ndarray,
        skip: np.ndarray | None = None,
    ) -> Found:
        values.fill(A_VALUE)
        state.fill(0)
        return Found(np.full(len(keys), -1, np.int64), self.index.deletions)

    def writeback(
        self,
        tables: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        state: np.ndarray,
        found: Found | None = None,
    ) -> None:
        pass


def leave_out(pipeline: TrainPipeline, only: str | None) -> None:
    """What a step would take if it had only to compute, or only to send and receive: no schedule can be faster than either."""
    if only == "compute":
        pipeline.replace_exchanges(SilentExchange)
    elif only == "wire":

        def nothing(context: BatchContext, micro: int) -> None:
            if micro == 0:
                pipeline.zero_grad()
            context.outputs.append(None)

        pipeline.replace_stages(compute=nothing, step=lambda context, micro: None)
    elif only is not None:
        raise ValueError(f"only must be compute or wire, not {only!r}")


def leave_out_tables(pipeline: TrainPipeline) -> None:
    """What a step would take if rows were there at no cost.  Before the first step; its own tables are closed."""
    for store in pipeline.replace_stores([NoRows(store.group, 0) for store in pipeline.stores]):
        store.close()
