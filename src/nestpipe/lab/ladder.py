"""A ladder: rungs of one workload, each changing one thing, and how to compare them (bench/*.toml)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path

from nestpipe.config.build import RecipeError, build
from nestpipe.errors import NestPipeError
from nestpipe.lab.layout import Layout
from nestpipe.lab.settings import read_settings

REPOSITORY = Path(__file__).parents[3]
LADDERS = REPOSITORY / "bench"
OUR_WORKER = "nestpipe.lab.worker"

Setting = bool | int | float | str | list[int | list[int]]


@dataclass(frozen=True)
class Rung:
    name: str
    set: dict[str, Setting] = field(default_factory=dict)
    """Settings on top of the ladder's workload.  For a rung of our own `read_settings` knows the keys."""
    peer: str | None = None
    """The peer whose program runs it; None: ours."""


@dataclass(frozen=True)
class Hides:
    """How much of some stages, exposed in one rung, another rung hides.

    Measured twice: by the timelines, and by the step times, each against a rung that has nothing to hide.  Step times
    also count what the hidden work takes away from the compute that hides it.
    """

    stages: list[str]
    exposed: str
    hidden: str
    without: list[str]
    """The same two rungs with nothing to hide."""


@dataclass(frozen=True)
class Mix:
    """The shares that a rung's step should have, in percent, so that the workload resembles another one."""

    rung: str
    lookup: float
    all2all: float
    compute: float
    """Everything else."""


MIX_POINTS = 5.0
"""How many percentage points a measured share may be off."""


@dataclass(frozen=True)
class Best:
    """A rung that tunes itself should be about as fast as the best of others with fixed values."""

    rung: str
    of: list[str]
    within: float
    """The most that its step may be of the best one's: the median of the ratios within rounds."""


@dataclass(frozen=True)
class Ladder:
    title: str
    worker: str
    """The module that runs our rungs."""
    rungs: list[Rung]
    workload: dict[str, Setting] = field(default_factory=dict)
    workers: int = 2
    """Each on a host of its own where there is a link, otherwise all on one host.  Not read where `hosts` is set."""
    rounds: int = 12
    against: list[str] = field(default_factory=list)
    """Rungs to compare all others with."""
    limit: list[str] = field(default_factory=list)
    """Rungs that each do part of a step's work: no schedule can beat the slowest of them, in any round."""
    hides: list[Hides] = field(default_factory=list)
    mix: Mix | None = None
    best: Best | None = None
    whole_turns: bool = False
    """Compare the time of whole turns instead of median steps: for work that happens once in a turn."""
    hosts: int | None = None
    """Hosts with `workers_per_host` workers each.  Without a link they are torchrun's nodes, all on loopback."""
    workers_per_host: int = 1
    link: str | None = None
    """Rate of every host's link, which its workers share; None: all workers on loopback."""
    inside: str | None = None
    """Rate at which workers of one host talk to one another, all together; None: as fast as the machine.  Needs a link."""
    disk: str | None = None
    """Rates of every host's disk, for example "read 20000/s, write 20mb/s"; None: as fast as the machine's."""

    def __post_init__(self) -> None:
        for name in ("workers", "hosts", "workers_per_host"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.hosts is not None:
            object.__setattr__(self, "workers", self.hosts * self.workers_per_host)
        elif self.workers_per_host > 1:
            raise ValueError("workers_per_host is for a ladder with hosts: set hosts, too")

    def layout(self, link: str | None) -> Layout:
        """Who is where, on links of this rate."""
        if self.hosts is not None:
            return Layout(self.hosts, self.workers_per_host)
        return Layout(self.workers, 1) if link is not None else Layout(1, self.workers)

    def only(self, names: list[str]) -> Ladder:
        """The ladder with these rungs (no names: all), and the comparisons that they allow."""
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


class BenchError(NestPipeError, RuntimeError):
    """A ladder cannot be run, or a rung failed; the message is one line."""


def ladders() -> list[str]:
    return sorted(path.stem for path in LADDERS.glob("*.toml"))


def load_ladder(name: str) -> Ladder:
    """Reads bench/NAME.toml and checks every key, so that a mistake shows before anything starts."""
    path = LADDERS / f"{name}.toml"
    if not path.is_file():
        there = ", ".join(ladders()) or f"none in {LADDERS}: run it from a checkout of the repository"
        raise BenchError(f"no ladder {name!r}; there are {there}")
    ladder = build(Ladder, tomllib.loads(path.read_text()), name)
    for rung in ladder.rungs:
        if rung.peer is None and ladder.worker == OUR_WORKER:
            try:
                read_settings({**ladder.workload, **rung.set})
            except RecipeError as error:
                raise RecipeError(f"ladder {name!r}, rung {rung.name!r}: {error}") from None
    return ladder
