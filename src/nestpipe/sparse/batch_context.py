"""The state of one batch on its way through the stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nestpipe.data.batch import Batch
from nestpipe.engine.one_shot_event import OneShotEvent
from nestpipe.keys.index import Found
from nestpipe.keys.window import Window
from nestpipe.schedule.action import Name
from nestpipe.sparse.buffers import RowBuffer
from nestpipe.sparse.routing import Routes
from nestpipe.sparse.window_buffer import WindowBuffer


@dataclass
class StepOutcome:
    """What all workers agree on before anything lasting is changed."""

    loss: float
    finite: bool
    grad_norm: float
    requests: frozenset[str] = frozenset()


@dataclass
class BatchContext:
    """One batch.  Each stage fills in its part; nothing is shared with another batch but the tables and the dense model."""

    number: int
    micros: list[Batch] = field(default_factory=list)
    micro_batches: int = 1
    """Into how many it is divided on every worker, with data or without."""
    has_data: bool = False
    refused: Exception | None = None
    """What is wrong with this worker's data of it; raised when its turn comes, so that what was read before is still trained."""
    planned: list[Window] = field(default_factory=list)
    """Per group: the rows that this worker needs."""
    routes: Routes | None = None
    ends: list[np.ndarray] = field(default_factory=list)
    """Per group, [N, L]: where the occurrences of each micro-batch and lookup end in the window's `inverse`."""
    buffers: list[RowBuffer] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    """Per group: where `retrieve` found the buffer's rows in the store."""
    previous: BatchContext | None = None
    """The batch before, while its rows may be newer than the store's; None where the store is always up to date."""
    two_before: BatchContext | None = None
    """The batch before that, while it may not be written back and `retrieve` has to look into its buffer; None where the store
    has its rows by then."""
    shared: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Per group: places in the previous batch's buffer and in this one's of the keys that both hold."""
    forgotten: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)
    """With `--check staleness`: groups, tables and keys that this batch's sweep has chosen, and that begin anew with it."""
    windows: list[WindowBuffer] = field(default_factory=list)
    arrived: dict[int, list[np.ndarray]] = field(default_factory=dict)
    """Per micro-batch and group: row gradients that came from all workers, not yet accumulated."""
    row_squares: float = 0.0
    """Of the gradients of this owner's rows, summed over all workers; not finite exactly where one of them is not."""
    outputs: list[Any] = field(default_factory=list)
    """Per micro-batch: what the model returned beside its loss; None where the micro-batch is empty here."""
    loss_sum: float = 0.0
    """This worker's part of the global mean loss."""
    outcome: StepOutcome | None = None
    parts: dict[Name, list[OneShotEvent]] = field(default_factory=dict)
    """Of an action that others may begin within: what tells them, one by one, that their part is final."""

    def refuse(self, error: Exception, rank: int, stage: str) -> None:
        """This worker takes part in it with nothing until its turn."""
        error.add_note(f"rank {rank}, {stage} of batch {self.number}")
        self.refused, self.micros, self.has_data = error, [], False

    @property
    def ended(self) -> bool:
        return self.routes is not None and self.routes.ended
