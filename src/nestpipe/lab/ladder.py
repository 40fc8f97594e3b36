"""What a ladder is: rungs of one workload, each of which changes one thing, and what is to be told of them (bench/*.toml)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nestpipe.config.build import build

REPOSITORY = Path(__file__).parents[3]
LADDERS = REPOSITORY / "bench"


@dataclass(frozen=True)
class Rung:
    name: str
    set: dict[str, Any] = field(default_factory=dict)
    """What this rung sets beside the workload."""
    peer: str | None = None
    """Whose program runs it; None: ours."""


@dataclass(frozen=True)
class Hides:
    """How much of what one rung exposes of some stages another one hides.

    Told twice: by the timelines, and by the step times, each compared with a rung that has nothing to hide.  The latter also
    counts what the hidden work takes away from the compute that it hides behind.
    """

    stages: list[str]
    exposed: str
    hidden: str
    without: list[str]
    """The same two rungs with nothing to hide."""


@dataclass(frozen=True)
class Mix:
    """How a rung's step should be divided, in percent: a workload made to resemble one elsewhere."""

    rung: str
    lookup: float
    all2all: float
    compute: float
    """All that is neither of the others."""


MIX_POINTS = 5.0
"""How far a measured share may be from the one wanted."""


@dataclass(frozen=True)
class Best:
    """A rung that chooses for itself what others are given: it should be as fast as the best of them."""

    rung: str
    of: list[str]
    within: float
    """Its step over that of the best, within a round: at most so much, in the middle round."""


@dataclass(frozen=True)
class Ladder:
    title: str
    worker: str
    """The module that runs our rungs."""
    rungs: list[Rung]
    workload: dict[str, Any] = field(default_factory=dict)
    workers: int = 2
    rounds: int = 12
    against: list[str] = field(default_factory=list)
    """Rungs that all others are compared with."""
    limit: list[str] = field(default_factory=list)
    """Rungs that do a part of a step's work each: in every round the slowest of them is what no schedule can beat."""
    hides: list[Hides] = field(default_factory=list)
    mix: Mix | None = None
    best: Best | None = None
    whole_turns: bool = False
    """Rungs are compared by all the time of their turns, for what comes once in a turn, and not by their median steps."""
    link: str | None = None
    """Of every worker's host; None: all on loopback."""
    disk: str | None = None
    """Rates of every host's disk, such as "read 20000/s, write 20mb/s"; None: as fast as the machine's."""

    def only(self, names: list[str]) -> Ladder:
        """With these rungs alone (none named: all of them), and of the comparisons those that they can answer."""
        there = [rung.name for rung in self.rungs]
        for name in names:
            if name not in there:
                raise BenchError(f"no rung {name!r} in this ladder; it has {', '.join(map(repr, there))}")
        if not names:
            return self
        limit = self.limit if set(self.limit) <= set(names) else []
        hides = [h for h in self.hides if {h.exposed, h.hidden, *h.without} <= set(names)]
        mix = self.mix if self.mix and self.mix.rung in names else None
        best = self.best if self.best and {self.best.rung, *self.best.of} <= set(names) else None
        rungs = [rung for rung in self.rungs if rung.name in names]
        return replace(self, rungs=rungs, limit=limit, hides=hides, mix=mix, best=best)


class BenchError(RuntimeError):
    """A ladder cannot be run, or a rung failed; the message is one line."""


def ladders() -> list[str]:
    return sorted(path.stem for path in LADDERS.glob("*.toml"))


def load_ladder(name: str) -> Ladder:
    path = LADDERS / f"{name}.toml"
    if not path.is_file():
        there = ", ".join(ladders()) or f"none in {LADDERS}: run it from a checkout of the repository"
        raise BenchError(f"no ladder {name!r}; there are {there}")
    values = tomllib.loads(path.read_text())
    rungs = [Rung(r["name"], r.get("set", {}), r.get("peer")) for r in values.pop("rungs")]
    workload = values.pop("workload", {})
    hides = [Hides(**h) for h in values.pop("hides", [])]
    mix = build(Mix, values.pop("mix"), "mix") if "mix" in values else None
    best = build(Best, values.pop("best"), "best") if "best" in values else None
    plain = vars(build(_Plain, values, name))
    return Ladder(rungs=rungs, workload=workload, hides=hides, mix=mix, best=best, **plain)


@dataclass(frozen=True)
class _Plain:
    title: str
    worker: str
    workers: int = 2
    link: str | None = None
    disk: str | None = None
    rounds: int = 12
    against: list[str] = field(default_factory=list)
    limit: list[str] = field(default_factory=list)
    whole_turns: bool = False
