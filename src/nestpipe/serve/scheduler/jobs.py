"""What waits for the compute thread: rankings, and prefixes that are computed ahead of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from nestpipe.infer.contract import History, Ranking, RelayModel
from nestpipe.serve.cache.prefix import Prefix


class Path(Enum):
    """How a ranking got its prefix; the value of X-Relay."""

    HIT = "hit"
    """All complete blocks were in the arena."""
    TAKEOVER = "takeover"
    """Some were there; the ranking computed the others."""
    DRAM = "dram"
    """All were there, some in the tier behind the arena."""
    MISS = "miss"
    """None was there: full inference."""
    REJECTED = "rejected"
    """None was there because its pre-inference had been refused."""


class Outcome(Enum):
    """How a ranking ended."""

    DONE = "done"
    FULL = "full"
    EXPIRED = "expired"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(eq=False)
class RankJob:
    """One request to rank, under one model version from its start to its end."""

    model: RelayModel
    user: str
    history: History
    """Windowed."""
    complete: int
    now: int
    """The request's time, of which scores depend."""
    candidates: np.ndarray
    arrived: float
    deadline: float
    on_done: Callable[[RankJob], None]
    path: Path = Path.MISS
    prefix: Prefix | None = None
    shares: int = 0
    """Leading blocks that are the prefix's; the others are private."""
    own: int = 0
    """Private blocks that are computed, in scratch memory."""
    private: bool = False
    """No more blocks go to the prefix: there was no room, or no prefix."""
    ranking: Ranking | None = None
    scored: int = 0
    scores: np.ndarray | None = None
    started: float | None = None
    ended: float | None = None
    outcome: Outcome | None = None
    why: str = ""
    retry_after: float = 0.0
    steps: list[tuple[str, float]] = field(default_factory=list)
    """(what, seconds) of each step, for the log of slow requests."""

    @property
    def have(self) -> int:
        """Blocks that can be read now."""
        shared = 0 if self.prefix is None else min(len(self.prefix.slots), self.shares)
        return shared + self.own

    @property
    def missing(self) -> int:
        return self.complete - self.have

    @property
    def over(self) -> bool:
        return self.outcome is not None


@dataclass(eq=False)
class PrefixJob:
    """A prefix to compute before anybody ranks on it: pre-inference, or re-warming for a new version."""

    model: RelayModel
    prefix: Prefix
    history: History
    complete: int
    due: float
    """When its ranking is expected."""
    rewarm: bool = False
    over: bool = False

    @property
    def missing(self) -> int:
        return self.complete - len(self.prefix.slots)
