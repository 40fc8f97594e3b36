"""One user's prefix under one model version: which of its blocks are where."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from nestpipe.infer.contract import History


class PrefixKey(NamedTuple):
    """Blocks of different keys are never mixed."""

    version: str
    user: str
    anchor: int
    """Index, in the user's whole history, of the window's first event."""


class State(Enum):
    """What a prefix is; a key that the cache does not know is ABSENT."""

    COMPUTING = "computing"
    READY = "ready"
    PINNED = "pinned"
    DRAM = "dram"
    LOADING = "loading"
    CANCELLED = "cancelled"
    STALE = "stale"


@dataclass
class Prefix:
    """Blocks 0 to k-1 are in the arena, k to n-1 in the tier behind it: the tail always leaves first.

    `history` is what the blocks were computed from.  A request with another history may use the blocks before the first
    difference, so a wrong or changed history costs time and never changes an answer.
    """

    key: PrefixKey
    history: History
    wanted: int = 0
    """Blocks that somebody has asked for."""
    slots: list[int] = field(default_factory=list)
    tier_slots: list[int] = field(default_factory=list)
    pins: int = 0
    loading: bool = False
    cancelled: bool = False
    stale: bool = False
    """Of a version that is gone: freed when the last pin is."""

    @property
    def blocks(self) -> int:
        return len(self.slots) + len(self.tier_slots)

    @property
    def state(self) -> State:
        if self.stale:
            return State.STALE
        if self.loading:
            return State.LOADING
        if len(self.slots) < self.wanted and self.cancelled:
            return State.CANCELLED
        if len(self.slots) >= self.wanted:
            return State.PINNED if self.pins else State.READY
        return State.DRAM if self.blocks >= self.wanted and not self.pins else State.COMPUTING


def shared_events(one: History, other: History) -> int:
    """How many events two histories with one start have in common, from the first on."""
    same = min(len(one), len(other))
    if one.context.keys() != other.context.keys():
        return 0
    pairs = [(one.items, other.items), (one.actions, other.actions), (one.times, other.times)]
    for a, b in pairs + [(one.context[name], other.context[name]) for name in one.context]:
        equal = a[:same] == b[:same]
        if not equal.all():
            same = int(equal.argmin())
    return same
