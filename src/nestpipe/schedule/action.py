"""An action: one stage of one batch (or of one of its micro-batches), the lane it runs on, what it waits for, what it touches."""

from __future__ import annotations

from dataclasses import dataclass

STAGES: dict[str, str] = {
    "load": "data",
    "move": "copy",
    "route": "route",
    "retrieve": "storage",
    "sync": "compute",
    "embed": "network",
    "compute": "compute",
    "grad": "network",
    "accumulate": "update",
    "reduce": "dense",
    "agree": "dense",
    "step": "compute",
    "update": "update",
    "writeback": "storage",
}
"""Every stage and its lane, in the order in which a batch passes them."""

LANES: tuple[str, ...] = ("data", "copy", "route", "storage", "network", "dense", "update", "compute")

Name = tuple[str, int, int]
"""(stage, batch, micro-batch); micro-batch -1 for a stage of the whole batch."""


@dataclass(frozen=True, slots=True)
class Action:
    """Immutable.  `reads` and `writes` name state, such as ("rows", 3) for the buffer of batch 3 or ("store",) for the tables."""

    stage: str
    batch: int
    micro: int = -1
    waits: tuple[Name, ...] = ()
    reads: tuple[tuple[str | int, ...], ...] = ()
    writes: tuple[tuple[str | int, ...], ...] = ()

    @property
    def lane(self) -> str:
        return STAGES[self.stage]

    @property
    def name(self) -> Name:
        return (self.stage, self.batch, self.micro)

    def __str__(self) -> str:
        return f"{self.stage} {self.batch}" + (f".{self.micro}" if self.micro >= 0 else "")
