"""`TrainState`: what checkpoints need from a trainer, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from nestpipe.comm.world import World
from nestpipe.tables.keyed import KeyedRows


@runtime_checkable
class TrainState(Protocol):
    """The training state of one worker.  Used between two batches, by the thread that trains.

    `TrainPipeline` is one.  Any other trainer with these members can be saved and restored too.
    """

    @property
    def world(self) -> World: ...

    @property
    def model(self) -> torch.nn.Module:
        """Its parameters are equal on all workers.  Its buffers may differ."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The dense optimizer; None if nothing dense is trained."""

    @property
    def dense_rate(self) -> Callable[[int], float] | None:
        """Scales the optimizer's learning rates at every step.  None: the rates are state, and are saved with it."""

    @property
    def next_batch(self) -> int:
        """Number of batches trained so far, which is the number of the next one."""

    @property
    def stores(self) -> Sequence[KeyedRows]:
        """This worker's row store of each table group, in the same order on all workers."""

    def settle(self) -> None:
        """Waits until the last step is in the tables."""

    def resume_at(self, batch: int) -> None:
        """Sets `next_batch` of a state that has not trained yet."""

    def eviction_state(self) -> dict[str, Any]:
        """This worker's eviction counts and clock as of `next_batch`, as plain JSON values; {} without eviction."""

    def restore_eviction(self, state: dict[str, Any]) -> None:
        """Takes all workers' merged `eviction_state`, after the rows are restored.  ValueError if it does not fit."""
