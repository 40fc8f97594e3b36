"""The race detector: accesses to the same bytes, one of them a write, that no event and no host sync orders.

Every stream carries a vector clock.  An access is compared with those before it on the same memory, by byte ranges.
The host counts as one: what any of its threads has waited for comes before whatever any of them issues later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nestpipe.device.sim.disjoint import active_reasons
from nestpipe.device.sim.machine import MACHINE, Clock, Queue
from nestpipe.device.sim.sites import Site

if TYPE_CHECKING:
    from nestpipe.device.sim.memory import Memory

_LONG = 24
"""From this length on a memory's log is searched for accesses that are over for everybody."""


@dataclass(slots=True, frozen=True)
class Access:
    stream: int
    item: int
    low: int
    high: int
    writes: bool
    name: str
    site: Site
    reasons: tuple[str, ...]

    def overlaps(self, other: Access) -> bool:
        return self.low < other.high and other.low < self.high

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


def note(queue: Queue, name: str, site: Site, uses: list[tuple[Memory, int, int, bool]]) -> None:
    """The next item of `queue` reads or writes these byte ranges: (memory, first, behind the last, writes)."""
    item = queue.issued + 1
    for memory, _, _, _ in uses:
        memory.refresh()
        memory.touched[queue] = item
    if not MACHINE.races:
        return
    reasons = active_reasons()
    for reason in reasons:
        FINDINGS.annotations.setdefault(reason, 0)
    clock = MACHINE.clock_of(queue)
    for memory, low, high, writes in uses:
        if low < high:
            _compare(memory, Access(queue.number, item, low, high, writes, name, site, reasons), clock)


def _compare(memory: Memory, new: Access, clock: Clock) -> None:
    kept = []
    for old in memory.log:
        ordered = old.stream == new.stream or not old.after(clock)
        if not ordered and old.overlaps(new) and (old.writes or new.writes):
            _found(old, new)
        if not (ordered and _replaces(new, old)):
            kept.append(old)
    kept.append(new)
    if len(kept) > _LONG:
        kept = [access for access in kept if access.after(MACHINE.host_clock)]
    memory.log[:] = kept


def _replaces(new: Access, old: Access) -> bool:
    """Whether everything that could race with `old` from now on would race with `new` as well."""
    covers = new.low <= old.low and old.high <= new.high and (new.writes or not old.writes)
    return covers and set(new.reasons) <= set(old.reasons)


def _found(old: Access, new: Access) -> None:
    common = next((reason for reason in new.reasons if reason in old.reasons), None)
    if common is not None:
        FINDINGS.annotations[common] += 1
        return
    verb, other = ("writes" if new.writes else "reads"), ("writes" if old.writes else "reads")
    FINDINGS.races[f"{new.told()} {verb} what {old.told()} {other}: nothing orders the two"] = None
