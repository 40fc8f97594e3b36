"""The race detector: accesses to the same bytes, one of them a write, that no event and no host sync orders.

Every stream carries a vector clock.  An access is compared with those before it on the same memory, by byte ranges.
The host counts as one: what any of its threads has waited for comes before whatever any of them issues later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from nestpipe.device.sim.disjoint import active_reasons
from nestpipe.device.sim.machine import MACHINE, Clock, Queue
from nestpipe.device.sim.sites import Site

if TYPE_CHECKING:
    from nestpipe.device.sim.memory import Memory

_LONG = 24
"""From this length on a memory's log is searched for accesses that are over for everybody."""


class Use(NamedTuple):
    """A range of bytes that an item reads or writes."""

    memory: Memory
    low: int
    high: int
    """Behind the last byte."""
    writes: bool
    row: int = 0
    """For columns of a matrix, how many bytes lie between two rows; 0 if the whole range is meant."""
    width: int = 0
    """And how many bytes of each row are used."""

    def overlaps(self, other: Use) -> bool:
        if self.low >= other.high or other.low >= self.high:
            return False
        if self.row == 0 or self.row != other.row:
            return True
        shift = (other.low - self.low) % self.row  # columns of the same matrix
        return shift < self.width or shift + other.width > self.row

    def covers(self, other: Use) -> bool:
        if self.low > other.low or other.high > self.high:
            return False
        if self.row == 0:
            return True
        shift = (other.low - self.low) % self.row
        return other.row == self.row and shift + other.width <= self.width


@dataclass(slots=True)
class Access:
    """A use, by whom, and when."""

    stream: int
    item: int
    use: Use
    name: str
    site: Site
    reasons: tuple[str, ...]

    def after(self, clock: Clock) -> bool:
        """Whether nothing says that this access is over at `clock`."""
        return clock.get(self.stream, 0) < self.item

    def told(self) -> str:
        return f"{self.name} on stream {self.stream} ({self.site})"


class Findings:
    """Races and silenced pairs so far.  Callers hold the machine's lock."""

    def __init__(self) -> None:
        self.races: dict[str, None] = {}
        self.annotations: dict[str, int] = {}

    def reset(self) -> None:
        self.races.clear()
        self.annotations.clear()


FINDINGS = Findings()


def note(queue: Queue, name: str, site: Site, uses: list[Use]) -> None:
    """The next item of `queue` reads or writes these bytes."""
    item = queue.issued + 1
    for use in uses:
        use.memory.refresh()
        use.memory.touched[queue] = item
    if not MACHINE.races:
        return
    reasons = active_reasons()
    for reason in reasons:
        FINDINGS.annotations.setdefault(reason, 0)
    clock = MACHINE.clock_of(queue)
    for use in uses:
        if use.low < use.high:
            _compare(Access(queue.number, item, use, name, site, reasons), clock)


def _compare(new: Access, clock: Clock) -> None:
    log = new.use.memory.log
    kept = []
    for old in log:
        ordered = old.stream == new.stream or not old.after(clock)
        if not ordered and (old.use.writes or new.use.writes) and old.use.overlaps(new.use):
            _found(old, new)
        if not (ordered and _replaces(new, old)):
            kept.append(old)
    kept.append(new)
    if len(kept) > _LONG:
        kept = [access for access in kept if access.after(MACHINE.host_clock)]
    log[:] = kept


def _replaces(new: Access, old: Access) -> bool:
    """Whether everything that could race with `old` from now on would race with `new` as well."""
    stronger = new.use.writes or not old.use.writes
    return stronger and new.use.covers(old.use) and set(new.reasons) <= set(old.reasons)


def _found(old: Access, new: Access) -> None:
    common = next((reason for reason in new.reasons if reason in old.reasons), None)
    if common is not None:
        FINDINGS.annotations[common] += 1
        return
    verb, other = ("writes" if new.use.writes else "reads"), ("writes" if old.use.writes else "reads")
    FINDINGS.races[f"{new.told()} {verb} what {old.told()} {other}: nothing orders the two"] = None
