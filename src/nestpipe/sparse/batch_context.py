"""The batch context: the state of one batch on its way through the stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from nestpipe.data.batch import Batch
from nestpipe.device.backend import Array
from nestpipe.device.one_shot_event import OneShotEvent
from nestpipe.keys.index import Found
from nestpipe.keys.window import Window
from nestpipe.schedule.action import Name
from nestpipe.sparse.buffers import RowBuffer
from nestpipe.sparse.routing import Routes
from nestpipe.sparse.window_buffer import WindowBuffer


@dataclass
class StepOutcome:
    """What all workers agree on before any lasting state changes."""

    loss: float
    finite: bool
    grad_norm: float
    requests: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RowLists:
    """Places of rows in one group of a batch, where row operations can read them: on a device they were uploaded."""

    embed_rows: Array
    grad_rows: Array
    last_order: Array
    inverse: Array
    shared: tuple[Array, Array]
    """Places of the rows that `sync` copies: in the buffer of the batch before, and here."""
    two_before: tuple[Array, Array]
    """Places of the rows that `retrieve` (or `peek`) copies: in the buffer of the batch before that, and here."""
    replica_rows: Array
    """`ReplicaPlan.rows`; empty without replicas."""
    peeked: Array = None
    """Places in `RowBuffer.outgoing` of what `peek` copies: the rows of `shared`, as they are before the batch before
    updates them."""


@dataclass
class BatchContext:
    """One batch.  Each stage fills in its part.  Batches share nothing but the tables and the dense model."""

    number: int
    micros: list[Batch] = field(default_factory=list)
    micro_batches: int = 1
    """Micro-batches of this batch, the same on every worker, with or without data."""
    moved: list[Batch] = field(default_factory=list)
    """The micro-batches as the model sees them: on its device."""
    has_data: bool = False
    refused: Exception | None = None
    """The error in this worker's data.  Raised when the batch is due, so that earlier batches are still trained."""
    planned: list[Window] = field(default_factory=list)
    """Per group: the rows that this worker needs; moved to `routes` by `route`."""
    routes: Routes | None = None
    ends: list[np.ndarray] = field(default_factory=list)
    """Per group, [N, L]: ends of each (micro-batch, lookup) in the window's `inverse`."""
    buffers: list[RowBuffer] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    """Per group: where `retrieve` found the buffer's rows in the store."""
    previous: BatchContext | None = None
    """The batch before, while its rows may be newer than the store's; None if the store is up to date."""
    readers: int | None = None
    """Stages that read this batch's buffer and then release it; None: as many as of any other."""
    two_before: BatchContext | None = None
    """The batch before `previous`, while it may not be written back and `retrieve` must look into its buffer; None if
    the store already has its rows."""
    shared: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Per group: places of the keys that both batches hold, in the previous buffer and in this one."""
    refreshed: bool = False
    """A schedule that is stale by design has sent the rows of `shared` again, up to date: after a checkpoint."""
    peeked_stamps: list[np.ndarray] = field(default_factory=list)
    """With `--check staleness`, per group: versions of what `peek` copied."""
    lists: list[RowLists] = field(default_factory=list)
    """Per group: the places that row operations need."""
    forgotten: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)
    """With `--check staleness`: groups, tables and keys that this batch's sweep marked, which start again."""
    windows: list[WindowBuffer] = field(default_factory=list)
    arrived: dict[int, list[Array]] = field(default_factory=dict)
    """Per micro-batch and group: row gradients received from all workers and not accumulated yet."""
    row_squares: list[float | Tensor] = field(default_factory=list)
    """Per group: sum of squares of the summed gradients of this owner's rows.  Not finite if and only if one of them is not."""
    outputs: list[Any] = field(default_factory=list)
    """Per micro-batch: what the model returned beside its loss; None if the micro-batch is empty on this worker."""
    losses: list[tuple[Tensor, float]] = field(default_factory=list)
    """Per micro-batch with loss terms: its mean loss, and its share of the global batch."""
    compute_seconds: float = 0.0
    """What the model's forward and backward passes took on the compute lane; NaN where the host does not see it."""
    loss_sum: float = 0.0
    """This worker's part of the global mean loss, since `agree`."""
    outcome: StepOutcome | None = None
    parts: dict[Name, list[OneShotEvent]] = field(default_factory=dict)
    """Events of actions that finish in parts: each is set when its part is final and others may use it."""

    def refuse(self, error: Exception, rank: int, stage: str) -> None:
        """Records an error.  Until the batch is due, this worker takes part in it without data."""
        error.add_note(f"rank {rank}, {stage} of batch {self.number}")
        self.refused, self.micros, self.has_data = error, [], False

    @property
    def ended(self) -> bool:
        return self.routes is not None and self.routes.ended
