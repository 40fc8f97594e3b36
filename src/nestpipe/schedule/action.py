"""An action: one stage of one batch (or of one of its micro-batches), its lane, what it waits for, what it does to state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nestpipe.schedule.effects import Effect
from nestpipe.schedule.options import DEFAULT, Options
from nestpipe.schedule.stages import STAGES, StageEffects

Name = tuple[str, int, int]
"""(stage, batch, micro-batch); micro-batch -1 for a stage of the whole batch.  For `reduce` the bucket is in its place."""


@dataclass(frozen=True, slots=True)
class Action:
    """Immutable.  Runs after the action before it on its lane and after all that it waits for."""

    stage: str
    batch: int
    micro: int
    waits: tuple[Name, ...]
    effects: Sequence[Effect]
    within: Name | None = None
    """An action that need not be over, if it says before that the part which this one needs is final: a bucket of gradients."""

    @property
    def lane(self) -> str:
        return STAGES[self.stage].lane

    @property
    def name(self) -> Name:
        return (self.stage, self.batch, self.micro)

    @property
    def after(self) -> tuple[Name, ...]:
        """All that it comes after, beside what is on its lane."""
        return self.waits if self.within is None else (*self.waits, self.within)

    def __str__(self) -> str:
        return label(self.name)


def label(name: Name) -> str:
    """As actions are called everywhere: `retrieve 3`, `embed 3.1`."""
    stage, batch, micro = name
    return f"{stage} {batch}" + (f".{micro}" if micro >= 0 else "")


def act(
    stage: str,
    batch: int,
    micro: int = -1,
    waits: tuple[Name, ...] = (),
    options: Options = DEFAULT,
    within: Name | None = None,
) -> Action:
    """An action with the effects that its stage has."""
    assert (micro < 0) == (STAGES[stage].part == "batch"), f"{stage} is one per {STAGES[stage].part}"
    return Action(stage, batch, micro, waits, StageEffects(stage, batch, micro, options), within)
