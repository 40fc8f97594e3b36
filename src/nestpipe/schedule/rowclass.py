"""Classes of rows: all that a schedule can tell about a key, and sets of such classes that need not be listed one by one.

What a key does in a batch, seen from one worker: it is absent, or the worker uses it from one micro-batch to another, or only
other workers use it.  A class says this for every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nestpipe.schedule.effects import Effect

Span = tuple[int, int]
"""Micro-batches of first and last use in a batch."""

ABSENT: Span = (-1, -1)
ELSEWHERE: Span = (1 << 30, 1 << 30)
"""In the batch, but not of the worker that is looked at."""


@dataclass(frozen=True)
class RowClass:
    """Where a key occurs: (batch, micro-batch of first use, of last use), by batch."""

    uses: tuple[tuple[int, int, int], ...]

    def __str__(self) -> str:
        if not self.uses:
            return "any rows"
        inside = [batch for batch, _, _ in self.uses]
        between = [b for b in range(inside[0], inside[-1]) if b not in inside]
        text = "rows in batch" + "es" * (len(inside) > 1) + " " + " and ".join(map(str, inside))
        text += " but not " + " or ".join(map(str, between)) if between else ""
        if any(last > 0 for _, _, last in self.uses):
            text += " (" + ", ".join(_use(*use) for use in self.uses) + ")"
        return text


def _use(batch: int, first: int, last: int) -> str:
    if (first, last) == ELSEWHERE:
        return f"of other workers in {batch}"
    return f"used in micro-batch {batch}.{first}" + (f" to {batch}.{last}" if last > first else "")


class Classes:
    """A set of row classes: per batch, what a key may do in it; anything in a batch that is not named.  Immutable."""

    def __init__(self, uses: Uses, known: dict[int, int]) -> None:
        self._uses = uses
        self._known = known
        """Per batch a bit set of spans."""

    @classmethod
    def all(cls, micro_batches: int) -> Classes:
        return cls(Uses(micro_batches), {})

    def count(self, batches: int) -> int:
        """How many classes there are over so many batches."""
        return len(self._uses.spans) ** batches

    def split(self, effect: Effect, micro: int, windowed: bool) -> tuple[Classes | None, Sequence[Classes]]:
        """Those that an effect in this micro-batch touches, None where there are none; and all others, in disjoint sets.

        Of rows that each worker has for itself (`windowed`) it touches those that the worker uses, in the effect's first batch,
        and uses as the effect says.
        Rows with one owner are touched whichever worker uses them.  There, `use` is taken as always met: some worker may do so.
        """
        touched, others = self, []
        for batch in effect.batches:
            may = touched._known.get(batch, self._uses.everything)
            its_own = windowed and batch == effect.batches[0]
            wanted = may & (self._uses.meeting(effect.use, micro) if its_own else self._uses.present)
            if wanted != may:
                others.append(touched._but(batch, may ^ wanted))
                touched = touched._but(batch, wanted)
            if not wanted:
                return None, others
        for batch in effect.without:
            may = touched._known.get(batch, self._uses.everything)
            if may & self._uses.present:
                others.append(touched._but(batch, may & self._uses.present))
                touched = touched._but(batch, may & ~self._uses.present)
            if not may & ~self._uses.present:
                return None, others
        return touched, others

    def example(self) -> RowClass:
        """One of them: in few batches, and early in these."""
        lowest = ((batch, (bits & -bits).bit_length() - 1) for batch, bits in sorted(self._known.items()))
        spans = ((batch, self._uses.spans[place]) for batch, place in lowest)
        return RowClass(tuple((batch, *span) for batch, span in spans if span != ABSENT))

    def _but(self, batch: int, spans: int) -> Classes:
        return Classes(self._uses, {**self._known, batch: spans})


class Uses:
    """All that a key may do in a batch of so many micro-batches, numbered, so that bits can stand for them."""

    def __init__(self, micro_batches: int) -> None:
        spans = ((f, l) for f in range(micro_batches) for l in range(f, micro_batches))
        self.spans: tuple[Span, ...] = (ABSENT, *spans, ELSEWHERE)
        self.everything = (1 << len(self.spans)) - 1
        self.present = self.everything & ~1
        self._meeting: dict[tuple[str, int], int] = {}

    def meeting(self, use: str, micro: int) -> int:
        """Those in which the worker itself uses the key, and in this micro-batch as `use` says."""
        if (use, micro) not in self._meeting:
            met = (1 << i for i, span in enumerate(self.spans) if _meets(span, use, micro))
            self._meeting[use, micro] = sum(met)
        return self._meeting[use, micro]


def _meets(span: Span, use: str, micro: int) -> bool:
    if span in (ABSENT, ELSEWHERE):
        return False
    first, last = span
    return {"": True, "first": micro == first, "last": micro == last, "used": first <= micro <= last}[use]
