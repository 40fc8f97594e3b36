"""Proves on the list, without running it, that a schedule computes what `serial` computes, for any keys and any workers.

Two things must hold for every class of rows (see `rowclass`).

1. No race: any two actions that touch the same state of such a key, one of them writing, are ordered, by lane order and waits.
   Then every way of running the list gives the same result, and it is enough to follow one.
2. The same reads: following the list, whatever an action reads was made by the very action that made it in `serial`.  Copies make
   nothing, so it does not matter which way a row went, only which version arrived.  An action is an unknown function of what it
   reads; so, one action after another, each makes what it makes in `serial`.  The same is asked of what outlives the list.

A schedule that is stale by design is held to another reference, as sharply: `compute(t)` must read rows that t-1 touches too as
`serial` has them just before `update(t-1)`, neither older nor newer, and every other read is asked for as above.

Classes are not listed.  A search back from each read to its origin splits them only where an effect touches some and not others,
so the work grows with the pairs of batches and not with their subsets.

Why a class need not say more.  Each worker has its own window, so for windowed rows one worker's first and last use is enough.
Two simplifications are left, both about effects that `add` only, and `_searchable` refuses any other: between first and last use
every micro-batch counts as using the row, and rows at their owner are added to in every micro-batch, as if some worker had its
last use there.  Such rows exist, so no alarm is false; and if every `add` finds the same thing with all of them taking place, it
does so with any of them left out, because an `add` hands on what it found.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nestpipe.schedule.action import Action, Name, label
from nestpipe.schedule.averaging import differing
from nestpipe.schedule.effects import WINDOWED, Effect, State, rows
from nestpipe.schedule.rowclass import Classes, RowClass

Origin = tuple[Name | None, State]
"""The action that made a value, and as what; no action where it was there at the start."""


@dataclass(frozen=True)
class Violation:
    """Why a list is not exact.  `first` and `second` are the two actions that break it."""

    first: Name
    second: Name
    rows: RowClass
    why: str

    def __str__(self) -> str:
        both = label(self.first) + (f" and {label(self.second)}" if self.second != self.first else "")
        return f"{both}, {self.rows}: {self.why}"


@dataclass(frozen=True)
class Proof:
    """What was looked at to find that a list is exact, that it differs by `stale` reads and nothing else, or that it is
    `serial` with averaged replicas."""

    actions: int
    pairs: int
    """Pairs of accesses to the same state, one of them writing, all ordered."""
    reads: int
    """Reads traced to their origin in both lists, each once for every set of classes that makes a difference."""
    classes: int
    """Classes of rows that these sets cover: all there are."""
    stale: int = 0
    """Of the reads, those of rows shared with the batch before, as they were before its update; the others are as in `serial`."""
    average_every: int = 0
    """Replicas train on their own for so many batches, in the reference, too; 0: they are equal."""

    @property
    def exact(self) -> bool:
        return not self.stale and not self.average_every

    @property
    def label(self) -> str:
        """In a few words what was proven."""
        return "exact" if self.exact else "not exact, by design"

    def __str__(self) -> str:
        classes = f"{self.classes:,}" if self.classes < 10**9 else f"10^{len(str(self.classes)) - 1}"
        bounds = []
        if self.stale:
            bounds.append("rows shared with the batch before are stale by one batch, never by more")
        if self.average_every:
            bounds.append(differing(self.average_every))
        bound = f"{', '.join(bounds)}, and nothing else differs from serial: "
        return (
            ("" if self.exact else bound)
            + f"{self.actions:,} actions, {self.pairs:,} pairs ordered, {self.reads - self.stale:,} reads the same, "
            + (f"{self.stale:,} stale by one batch, " if self.stale else "")
            + f"for all {classes} classes of rows"
        )


def check(actions: Sequence[Action], reference: Sequence[Action], stale: bool = False) -> Violation | None:
    """None where `actions` is exactly `reference` (the serial list of the same batches), or what breaks it.

    `stale`: it must differ, by rows shared with the batch before that are read as they were before its update.
    """
    found = examine(actions, reference, stale)
    return found if isinstance(found, Violation) else None


def examine(
    actions: Sequence[Action], reference: Sequence[Action], stale: bool = False, average_every: int = 0
) -> Violation | Proof:
    """Like `check`, with the figures of the proof where there is one.

    `average_every`: of the options of both lists, for the proof to say what it does not prove.
    """
    _searchable(actions)
    different = _different_actions(actions, reference)
    if different:
        return different
    before = happens_before(actions)
    if isinstance(before, Violation):
        return before
    every = Classes.all(1 + max((a.micro for a in actions if a.stage != "reduce"), default=0))
    pairs = _races(actions, before, every)
    if isinstance(pairs, Violation):
        return pairs
    reads = _different_reads(_Run(actions), _Run(reference), every, stale)
    if isinstance(reads, Violation):
        return reads
    return Proof(len(actions), pairs, sum(reads), every.count(len({a.batch for a in actions})), reads[1], average_every)


def _searchable(actions: Sequence[Action]) -> None:
    """ValueError for effects that the argument above does not cover."""
    for action in actions:
        for effect in action.effects:
            overwrites = effect.kind in ("write", "copy")
            if overwrites and effect.use and (effect.use == "used" or effect.state[0] not in WINDOWED):
                what = " ".join(map(str, effect.state))
                raise ValueError(f"{action}: check cannot follow a {effect.kind} of {what} for rows {effect.use} in it")


def _different_actions(actions: Sequence[Action], reference: Sequence[Action]) -> Violation | None:
    """Each action of the reference once and no others, and each of them a function of the same things."""
    times = Counter(a.name for a in actions)
    wanted = {a.name: a for a in reference}
    nothing = RowClass(())
    for name in wanted:
        if name not in times:
            return Violation(name, name, nothing, "is not in the list")
        if times[name] > 1:
            return Violation(name, name, nothing, f"is in the list {times[name]} times")
    for action in actions:
        if action.name not in wanted:
            return Violation(action.name, action.name, nothing, "is in the list and not in the reference")
        mine, others = ({(e.state, e.batches, e.use) for e in _reads(a)} for a in (action, wanted[action.name]))
        for state, _, _ in sorted(mine ^ others, key=str):
            what = " ".join(map(str, state))
            return Violation(action.name, action.name, nothing, f"does not read {what} as in the reference")
    return None


def happens_before(actions: Sequence[Action]) -> list[int] | Violation:
    """For every action a bit set of the actions that surely come before what it does.

    An action that may begin within another comes after the part that it needs, and that part is all of the other that it
    touches.  The other may go on, so whoever comes after the first need not come after the second.
    """
    place = {action.name: i for i, action in enumerate(actions)}
    begin = min((a.batch for a in actions), default=0)
    last_on_lane: dict[str, int] = {}
    before: list[int] = []
    handed_on: list[int] = []
    """Per action, what all that follow it come after as well."""
    for i, action in enumerate(actions):
        bits = within = 0
        for wait in action.after:
            if wait not in place:
                if wait[1] < begin:
                    continue  # before the part of the schedule that is looked at
                return Violation(wait, action.name, RowClass(()), "the second waits for what is not in the list")
            j = place[wait]
            if j >= i:
                why = "the first waits for the second, which is issued later" if j > i else "waits for itself"
                return Violation(action.name, wait, RowClass(()), why)
            bits |= handed_on[j]
            if wait == action.within and wait not in action.waits:
                within = 1 << j
            else:
                bits |= 1 << j
        lane = last_on_lane.get(action.lane)
        if lane is not None:
            bits |= handed_on[lane] | 1 << lane
        last_on_lane[action.lane] = i
        handed_on.append(bits)
        before.append(bits | within)
    return before


def _reads(action: Action) -> list[Effect]:
    """Of what the action is a function.  Copies are followed, not read."""
    return [effect for effect in action.effects if effect.kind in ("read", "add")]


def _split(rows: Classes, action: Action, effect: Effect, state: State) -> tuple[Classes | None, Sequence[Classes]]:
    return rows.split(effect, action.micro, state[0] in WINDOWED)


def _races(actions: Sequence[Action], before: list[int], every: Classes) -> Violation | int:
    """How many pairs of accesses are ordered, or two that are not and meet on some row."""
    touched: dict[State, list[tuple[int, Effect, bool]]] = defaultdict(list)
    pairs = 0
    for i, action in enumerate(actions):
        for effect in action.effects:
            accesses = [(effect.state, effect.kind != "read")]
            if effect.source is not None:
                accesses.append((effect.source, False))
            for state, writes in accesses:
                for j, other, other_writes in touched[state]:
                    if i == j or not (writes or other_writes):
                        continue
                    if before[i] >> j & 1:
                        pairs += 1
                        continue
                    rows, _ = _split(every, actions[j], other, state)
                    both = rows and _split(rows, action, effect, state)[0]
                    if both:
                        why = f"both touch {' '.join(map(str, state))} and nothing orders them"
                        return Violation(actions[j].name, action.name, both.example(), why)
                touched[state].append((i, effect, writes))
    return pairs


class _Run:
    """A list followed in its own order: who wrote what, and so where everything came from."""

    def __init__(self, actions: Sequence[Action]) -> None:
        self.actions = actions
        self.place = {action.name: i for i, action in enumerate(actions)}
        self.writes: dict[State, list[tuple[int, Effect]]] = defaultdict(list)
        for i, action in enumerate(actions):
            for effect in action.effects:
                if effect.kind != "read":
                    self.writes[effect.state].append((i, effect))

    def origins(self, state: State, at: int, rows: Classes) -> Iterator[tuple[Classes, Origin]]:
        """Where that which is in `state` before place `at` comes from, for all of `rows`, each in one of the sets."""
        writes = self.writes[state]
        left = [rows]
        for i, effect in reversed(writes[: bisect_left(writes, at, key=lambda write: write[0])]):
            undecided, left = left, []
            for some in undecided:
                touched, others = _split(some, self.actions[i], effect, state)
                left += others
                if touched is not None and effect.source is not None:
                    yield from self.origins(effect.source, i, touched)
                elif touched is not None:
                    yield touched, (self.actions[i].name, state)
            if not left:
                return
        for some in left:
            yield some, (None, state)


def _different_reads(run: _Run, reference: _Run, every: Classes, stale: bool) -> Violation | tuple[int, int]:
    """How many reads find the same and how many something older, as they must, or one that finds something else."""
    counts = [0, 0]
    for place, action in enumerate(run.actions):
        for effect in _reads(action):
            touched, _ = _split(every, action, effect, effect.state)
            if touched is None:
                continue
            in_reference = reference.place[action.name]
            older, others = _shared_with_batch_before(effect, touched, reference) if stale else (None, [touched])
            compared = [(0, effect.state, in_reference, some) for some in others]
            if older is not None:
                before = effect.state[1] - 1  # type: ignore[operator]
                compared.append((1, rows(before)[0], reference.place["update", before, -1], older))
            for is_older, state, at, which in compared:
                for fewer, wanted, found in _origins(run, reference, (effect.state, place), (state, at), which):
                    counts[is_older] += 1
                    if wanted != found:
                        what = " ".join(map(str, effect.state))
                        why = f"{action} must read {what} as {_left(wanted)}, but reads it as {_left(found)}"
                        maker = wanted[0] or (found[0] if is_older else None) or action.name
                        return Violation(maker, action.name, fewer.example(), why)
    for state in sorted({s for r in (run, reference) for s in r.writes if _outlives(s)}, key=str):
        ends = (state, len(run.actions)), (state, len(reference.actions))
        for some, wanted, found in _origins(run, reference, *ends, every):
            counts[0] += 1
            if wanted != found:
                why = f"at the end {' '.join(map(str, state))} must be as {_left(wanted)}, but is as {_left(found)}"
                begun, ended = wanted[0] or found[0], found[0] or wanted[0]
                assert begun is not None and ended is not None
                return Violation(begun, ended, some.example(), why)
    return counts[0], counts[1]


def _shared_with_batch_before(
    effect: Effect, touched: Classes, reference: _Run
) -> tuple[Classes | None, Sequence[Classes]]:
    """Of what a model reads: rows that the batch before touches too, and all others."""
    if effect.state[0] != "window":
        return None, [touched]
    before = effect.state[1] - 1  # type: ignore[operator]
    if ("update", before, -1) not in reference.place:
        return None, [touched]
    return touched.split(Effect("read", rows(before)[0], batches=(before,)), -1, windowed=False)


def _origins(
    run: _Run, reference: _Run, where: tuple[State, int], reference_where: tuple[State, int], rows: Classes
) -> Iterator[tuple[Classes, Origin, Origin]]:
    """For each set of rows that have the same origins: that in the reference and that in the list, of a state at a place each."""
    for some, wanted in reference.origins(*reference_where, rows):
        for fewer, found in run.origins(*where, some):
            yield fewer, wanted, found


def _outlives(state: State) -> bool:
    """The tables, the dense model and the source: what is not of one batch."""
    return not any(isinstance(part, int) for part in state)


def _left(origin: Origin) -> str:
    maker, state = origin
    return f"{label(maker)} left it" if maker else f"{' '.join(map(str, state))} was at the start"
