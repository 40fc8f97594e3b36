"""Where a stream goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from nestpipe.data.source import Interval


@dataclass(frozen=True)
class Position:
    """Where a stream goes on: in `epoch`, in the `interval`-th interval of this worker's shard, at `unit`."""

    epoch: int = 0
    interval: int = 0
    unit: int = -1
    """-1: the start of the interval."""

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    @staticmethod
    def from_dict(values: object) -> Position:
        """ValueError unless it is what `as_dict` gives."""
        names = [f.name for f in fields(Position)]
        if not isinstance(values, Mapping) or sorted(values) != sorted(names):
            raise ValueError(f"a position has {', '.join(names)}, not {values!r}")
        position = Position(**values)
        if (
            not all(type(n) is int for n in values.values())
            or min(position.epoch, position.interval, position.unit + 1) < 0
        ):
            raise ValueError(f"no position: {values!r}")
        return position


def fraction_done(intervals: Sequence[Interval], at: Position, epochs: int | None) -> float:
    """How much of all epochs is before a position; 0 where the epochs never end."""
    total = sum(stop - start for start, stop in intervals)
    if not total or not epochs:
        return 0.0
    done = sum(stop - start for start, stop in intervals[: at.interval])
    if at.unit >= 0:
        done += min(at.unit, intervals[at.interval][1]) - intervals[at.interval][0]
    return (at.epoch + done / total) / epochs
