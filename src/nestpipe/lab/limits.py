"""Limits for every schedule: a step that only computes, and a step that only sends and receives.

Both train nonsense.  A pipeline with something left out is for measuring; close it afterwards.
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
"""The value of every row if there are no tables: not zero, as a model may divide by it."""


class SilentExchange(Exchange):
    """Sends nothing, and receives zeros."""

    def exchange(self, sends: Sequence[Sequence[torch.Tensor]], receives: Sequence[Sequence[torch.Tensor]]) -> None:
        for tensors in receives:
            for tensor in tensors:
                tensor.zero_()

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp = dist.ReduceOp.SUM) -> None:
        pass


class NoRows(RowStore):
    """Has the same row for every key, takes no time, and stores nothing."""

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
    """Leaves out all but "compute" or the "wire"; None leaves nothing out.  No schedule can beat either step."""
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
    """Makes lookups free: closes the tables and puts `NoRows` in their place.  Only before the first step."""
    for store in pipeline.replace_stores([NoRows(store.group, 0) for store in pipeline.stores]):
        store.close()
