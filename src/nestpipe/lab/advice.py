"""Turns the figures of a profile into advice: what bounds the step, what is hidden, what to change.  Measures nothing.

A gain is promised only if it was measured and the rounds agree.  What a faster link, more DRAM or a faster device would
bring is an upper bound.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nestpipe.config.toml import toml_value
from nestpipe.lab.summary import spread
from nestpipe.schedule.parts import SHARES, divide

WORTH = 1.02
"""A change must make the step this many times faster to be mentioned."""
AT_LIMIT = 1.05
SMALL = 0.05
"""Exposed time below this fraction of the step is not mentioned."""
INPUT, STORAGE = ("load", "move", "route"), ("retrieve", "writeback")
TITLES = {"lookup": "lookup", "all2all": "All2All", "dense": "dense all-reduce"}


@dataclass(frozen=True)
class Variant:
    """One way to run the recipe."""

    schedule: str
    micro_batches: int
    only: str | None = None
    """"compute" or "wire" marks a limit: its step does nothing else, and trains nonsense."""

    @property
    def name(self) -> str:
        return f"{self.only} alone" if self.only else f"{self.schedule} N={self.micro_batches}"


@dataclass(frozen=True, eq=False)
class MeasuredVariant(Variant):
    """A variant with its step on the slowest worker."""

    round_ms: Sequence[float] = ()
    """The median step of each round.  All variants have the same rounds, in the same order."""
    exposed: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds by stage; they add up to the step."""
    samples_per_s: float = 0.0
    bytes_sent: float = 0.0

    @property
    def step_ms(self) -> float:
        return statistics.median(self.round_ms)

    def exposed_in(self, *stages: str) -> float:
        return sum(self.exposed.get(stage, 0.0) for stage in stages)


@dataclass(frozen=True)
class ProfileFigures:
    """Everything that was measured of a recipe."""

    own: MeasuredVariant
    """The recipe as it stands."""
    runs: Sequence[MeasuredVariant]
    """All variants that train, `own` among them; at least one is serial and one is not."""
    limits: Sequence[MeasuredVariant]
    """Compute alone and, with several workers, the wire alone."""
    storage_ms: float = 0.0
    """The longer of retrieve and writeback, which have lanes of their own."""
    machines: int = 1
    threads: int | None = None
    """`train.threads` that would use this machine's idle cores."""
    dram_rows: int | None = None
    """Of the disk tier, if the tables did not fit in it."""

    @property
    def serial(self) -> MeasuredVariant:
        """The serial run whose micro-batches are closest to the recipe's."""
        serial = [run for run in self.runs if run.schedule == "serial"]
        return min(serial, key=lambda run: abs(run.micro_batches - self.own.micro_batches))

    def limits_of(self, run: MeasuredVariant) -> dict[str, float]:
        """What no schedule with as many micro-batches can go below, by what takes the time."""
        found = {"compute": 0.0, "wire": 0.0, "storage": self.storage_ms}
        for limit in self.limits:
            found[str(limit.only)] = limit.step_ms
            if limit.only == "compute" and limit.micro_batches != run.micro_batches:  # fewer are cheaper
                found["compute"] = min(limit.step_ms, run.exposed_in(*SHARES["compute"]))
        # Noise, or lanes that get in each other's way, can put a limit above a step that was measured.
        fastest = min(other.step_ms for other in self.runs if other.micro_batches == run.micro_batches)
        return {what: min(ms, fastest) for what, ms in found.items()}


@dataclass(frozen=True)
class Change:
    """A change to make, and what it saves."""

    text: str
    kind: str
    """measured; unsure: the rounds do not agree; none: nothing measured is faster; at most: an upper bound."""
    saves_ms: float = 0.0
    settings: Mapping[str, str | int] = field(default_factory=dict)
    """Keys of the recipe with their new values."""


def gains(slow: MeasuredVariant, fast: MeasuredVariant) -> list[float]:
    """How many times faster, round by round: a machine may get slower from one round to the next."""
    return [a / b for a, b in zip(slow.round_ms, fast.round_ms)]


def agree(ratios: Sequence[float]) -> bool:
    """Whether two equal variants would come out like this at most once in eight times: three of three rounds do."""
    rounds, faster = len(ratios), sum(ratio > 1 for ratio in ratios)
    return 8 * sum(math.comb(rounds, k) for k in range(faster, rounds + 1)) <= 2**rounds


def advise(figures: ProfileFigures) -> tuple[list[str], list[Change]]:
    """Sentences about the step; then changes, that of the schedule first and upper bounds by what they save."""
    best = _fastest(figures)
    base = best if best is not None and agree(gains(figures.own, best)) else figures.own
    return [_bound(figures), *_hidden(figures, base)], [_schedule(figures, best), *_upper_bounds(figures, base)]


def _fastest(figures: ProfileFigures) -> MeasuredVariant | None:
    """A variant that is faster than the recipe, for sure if there is one; of equals the one that changes least."""
    ratios = {run: gains(figures.own, run) for run in figures.runs}
    gain = {run: statistics.median(ratios[run]) for run in figures.runs}
    worth = [run for run in figures.runs if gain[run] >= WORTH]
    worth = [run for run in worth if agree(ratios[run])] or worth
    close = [run for run in worth if gain[run] * 1.01 >= max(gain[other] for other in worth)]
    kept = figures.own.micro_batches
    return min(close, key=lambda run: (run.micro_batches != kept, run.micro_batches), default=None)


def _bound(figures: ProfileFigures) -> str:
    own, limits = figures.own, figures.limits_of(figures.own)
    largest = max(limits, key=lambda what: limits[what])
    what = largest if limits[largest] * AT_LIMIT >= own.step_ms else "nothing alone"
    alone = ", ".join(f"{what} {_ms(ms)}" for what, ms in limits.items() if ms)
    return (
        f"{what} bounds the step of {_ms(own.step_ms)} ms.  Its parts alone take: {alone}; no schedule with "
        f"N={own.micro_batches} goes below {_ms(limits[largest])}"
    )


def _hidden(figures: ProfileFigures, base: MeasuredVariant) -> list[str]:
    """What serial exposes of each share, and what a schedule that overlaps leaves of it."""
    serial, shown = figures.serial, base
    if base.schedule == "serial":
        shown = min((run for run in figures.runs if run.schedule != "serial"), key=lambda run: run.step_ms)
    exposed, left = divide(serial.exposed), divide(shown.exposed)
    told = []
    for share, title in TITLES.items():
        stays = left[share] >= SMALL * shown.step_ms
        if stays or exposed[share] >= SMALL * serial.step_ms:
            mostly = f", mostly {max(SHARES[share], key=shown.exposed_in)}" if stays else ""
            told.append(
                f"{title}: {serial.name} exposes {_ms(exposed[share])} ms a step; {shown.name} hides "
                f"{_ms(max(0.0, exposed[share] - left[share]))} and leaves {_ms(left[share])}{mostly}"
            )
    return told


def _schedule(figures: ProfileFigures, best: MeasuredVariant | None) -> Change:
    own = figures.own
    if best is None:
        over = own.step_ms / max(figures.limits_of(own).values())
        text = f"nothing in [pipeline]: no variant is faster than {own.name}, which takes {over:.2f} times its limit"
        return Change(text, "none")
    ratios, instead = gains(own, best), f"{_ms(best.step_ms)} ms instead of {_ms(own.step_ms)}"
    if not agree(ratios):
        faster = f"faster in {sum(ratio > 1 for ratio in ratios)} of {len(ratios)} rounds"
        text = (
            f"perhaps {best.name}: {instead}, but {faster}, too few to tell.  Use more --seconds, or a quieter machine"
        )
        return Change(text, "unsure")
    settings: dict[str, str | int] = {}
    if best.schedule != own.schedule:
        settings["pipeline.schedule"] = best.schedule
    if best.micro_batches != own.micro_batches:
        settings["pipeline.micro_batches"] = best.micro_batches
    same = "but for rounding" if "pipeline.micro_batches" in settings else "bit for bit"
    keys = ", ".join(f"{key} = {toml_value(value)}" for key, value in settings.items())
    gain = "{median:.2f}x ({low:.2f} to {high:.2f}".format(**spread(ratios)) + f" in {len(ratios)} rounds)"
    text = f"{keys}: {instead}, {gain}, measured; same result, {same}"
    return Change(text, "measured", own.step_ms - best.step_ms, settings)


def _upper_bounds(figures: ProfileFigures, base: MeasuredVariant) -> list[Change]:
    """What is not in [pipeline].  The critical path bounds what each can save, and so do the other limits."""
    limits = figures.limits_of(base)
    threads = f" (try train.threads = {figures.threads})" if figures.threads else ""
    link = "a link of twice the rate" if figures.machines > 1 else "twice the speed between workers (here: of the CPU)"
    wire = (*SHARES["all2all"], *SHARES["dense"])
    ideas = [
        (
            f"computing twice as fast{threads}",
            "compute",
            base.exposed_in(*SHARES["compute"]) / 2,
            limits["compute"] / 2,
        ),
        (link, "wire", base.exposed_in(*wire) / 2, limits["wire"] / 2),
        ("reading and routing data faster", "input", base.exposed_in(*INPUT), math.inf),
    ]
    if figures.dram_rows is not None:
        more = f"more rows in DRAM than tables.dram_rows = {figures.dram_rows}"
        ideas.append((more, "storage", base.exposed_in(*STORAGE), limits["storage"]))
    found = []
    for text, what, exposed, alone in ideas:
        others = max(ms for name, ms in limits.items() if name != what)
        saves = min(exposed, alone, base.step_ms - others)
        if saves >= (WORTH - 1) * base.step_ms:
            text += f" would save at most {_ms(saves)} of the {_ms(base.step_ms)} ms of {base.name}"
            found.append(Change(text, "at most", saves))
    return sorted(found, key=lambda change: -change.saves_ms)[:3]


def _ms(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"
