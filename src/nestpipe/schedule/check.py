"""Proves on the list, without running it, that a schedule computes what `serial` computes, for any keys.

A key is fully described, as far as a schedule can tell, by the batches in which it occurs and, in each, the micro-batches that
use it first and last: its *class*.  For every class over the batches of the list, two things must hold.

1. No race: any two actions that touch the same state of such a key, one of them writing, are ordered, by lane order and waits.
   Then every way of running the list gives the same result, and it is enough to follow one.
2. The same reads: following the list, with every action an unknown function of what it reads, each action reads the very terms
   that it reads in `serial`.  Copies pass terms on, so it does not matter which way a row went, only which version arrived.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nestpipe.schedule.action import LANES, Action, Name, label
from nestpipe.schedule.effects import Effect, State


@dataclass(frozen=True)
class RowClass:
    """Where a key occurs: batch -> (micro-batch of first use, of last use)."""

    uses: tuple[tuple[int, int, int], ...]

    def touches(self, effect: Effect, micro: int) -> bool:
        """Whether an effect on rows, in this micro-batch, touches such a key."""
        span = {batch: (first, last) for batch, first, last in self.uses}
        if not all(batch in span for batch in effect.batches):
            return False
        if not effect.use:
            return True
        first, last = span[effect.batches[0]]
        return {"first": micro == first, "last": micro == last, "used": first <= micro <= last}[effect.use]

    def __str__(self) -> str:
        if not self.uses:
            return "no rows"
        inside = [batch for batch, _, _ in self.uses]
        between = [b for b in range(inside[0], inside[-1]) if b not in inside]
        text = "rows in batch" + "es" * (len(inside) > 1) + " " + " and ".join(map(str, inside))
        text += " but not " + " or ".join(map(str, between)) if between else ""
        if any(last > 0 for _, _, last in self.uses):
            spans = (f"{f} to {l} of {b}" for b, f, l in self.uses)
            text += " (used in micro-batches " + ", ".join(spans) + ")"
        return text


@dataclass(frozen=True)
class Violation:
    """Why a list is not exact.  `first` and `second` are the two actions that break it."""

    first: Name
    second: Name
    rows: RowClass
    why: str

    def __str__(self) -> str:
        return f"{label(self.first)} and {label(self.second)}, {self.rows}: {self.why}"


def check(actions: Sequence[Action], reference: Sequence[Action]) -> Violation | None:
    """None where `actions` is exactly `reference` (the serial list of the same batches), or what breaks it."""
    before = _happens_before(actions)
    if isinstance(before, Violation):
        return before
    missing = {a.name for a in reference} ^ {a.name for a in actions}
    if missing:
        name = min(missing)
        return Violation(name, name, RowClass(()), "is in only one of the two lists")
    batches = sorted({a.batch for a in actions})
    micros = 1 + max((a.micro for a in actions), default=0)
    for rows in _classes(batches, micros):
        found = _race(actions, before, rows) or _different_read(actions, reference, rows)
        if found:
            return found
    return None


def _happens_before(actions: Sequence[Action]) -> list[int] | Violation:
    """For every action a bit set of the actions that surely come before it."""
    place = {action.name: i for i, action in enumerate(actions)}
    known = set(place)
    last_on_lane: dict[str, int] = {}
    before: list[int] = []
    for i, action in enumerate(actions):
        bits = 0
        for wait in action.waits:
            if wait not in known:
                if wait[1] < min(a.batch for a in actions):
                    continue  # before the part of the schedule that is looked at
                return Violation(wait, action.name, RowClass(()), "the second waits for what is not in the list")
            j = place[wait]
            if j > i:
                return Violation(
                    action.name, wait, RowClass(()), "the first waits for the second, which is issued later"
                )
            bits |= before[j] | 1 << j
        lane = last_on_lane.get(action.lane)
        if lane is not None:
            bits |= before[lane] | 1 << lane
        last_on_lane[action.lane] = i
        before.append(bits)
    return before


def _classes(batches: Sequence[int], micros: int) -> Iterator[RowClass]:
    """Every set of batches, with every pair of first and last use (the same in all batches: a use concerns one batch only)."""
    spans = [(f, l) for f in range(micros) for l in range(f, micros)]
    for size in range(len(batches) + 1):
        for inside in itertools.combinations(batches, size):
            if not inside:
                yield RowClass(())
                continue
            for f, l in spans:
                yield RowClass(tuple((b, f, l) for b in inside))


def _accesses(action: Action, rows: RowClass) -> Iterator[tuple[Effect, State, bool]]:
    """(effect, state, writes) of an action on one key of the class, and on what is not rows."""
    for effect in action.effects:
        if effect.batches and not rows.touches(effect, action.micro):
            continue
        if effect.kind == "copy":
            assert effect.source is not None
            yield effect, effect.source, False
        yield effect, effect.state, effect.kind != "read"


def _race(actions: Sequence[Action], before: list[int], rows: RowClass) -> Violation | None:
    touched: dict[State, list[tuple[int, bool]]] = defaultdict(list)
    for i, action in enumerate(actions):
        for _, state, writes in _accesses(action, rows):
            for j, other_writes in touched[state]:
                if (writes or other_writes) and j != i and not before[i] >> j & 1:
                    what = " ".join(map(str, state))
                    return Violation(actions[j].name, action.name, rows, f"both touch {what} and nothing orders them")
            touched[state].append((i, writes))
    return None


class _Terms:
    """Symbolic values, one number each: 0 is what was there at the start; others are (action, state, what it had read)."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Name, State, tuple[tuple[State, int], ...]], int] = {}
        self._makers: list[Name | None] = [None]

    def make(self, maker: Name, state: State, read: tuple[tuple[State, int], ...]) -> int:
        key = (maker, state, read)
        if key not in self._numbers:
            self._numbers[key] = len(self._makers)
            self._makers.append(maker)
        return self._numbers[key]

    def maker(self, term: int) -> Name | None:
        return self._makers[term]

    def word(self, term: int) -> str:
        maker = self._makers[term]
        return label(maker) if maker else "the start"


def _different_read(actions: Sequence[Action], reference: Sequence[Action], rows: RowClass) -> Violation | None:
    terms = _Terms()
    expected, found = _follow(reference, rows, terms), _follow(actions, rows, terms)
    for action in actions:
        for state, term in found[action.name].items():
            wanted = expected[action.name].get(state, 0)
            if wanted != term:
                what = " ".join(map(str, state))
                why = f"the second must read {what} as {terms.word(wanted)} left it, but reads what {terms.word(term)} left"
                return Violation(terms.maker(wanted) or action.name, action.name, rows, why)
    return None


def _follow(actions: Sequence[Action], rows: RowClass, terms: _Terms) -> dict[Name, dict[State, int]]:
    """What every action reads, when the list is run in its own order."""
    now: dict[State, int] = {}
    seen: dict[Name, dict[State, int]] = {}
    for action in actions:
        effects = [e for e in action.effects if not e.batches or rows.touches(e, action.micro)]
        read = {e.state: now.get(e.state, 0) for e in effects if e.kind in ("read", "add")}
        copies = [(e.state, now.get(e.source, 0)) for e in effects if e.kind == "copy" and e.source is not None]
        inputs = tuple(sorted(read.items(), key=str))
        written = [e.state for e in effects if e.kind in ("write", "add")]
        now.update({state: terms.make(action.name, state, inputs) for state in written})
        now.update(copies)
        seen[action.name] = read
    return seen


def lane_order(actions: Sequence[Action]) -> dict[str, list[Action]]:
    """The actions of each lane, in order."""
    lanes: dict[str, list[Action]] = {lane: [] for lane in LANES}
    for action in actions:
        lanes[action.lane].append(action)
    return lanes
