"""Figures of a profile in, sentences out: what bounds the step, what is hidden, what to change.  Measures nothing.

A gain is promised only where it was measured round by round and the rounds agree; what a better link, more DRAM or a faster
device would bring is given as the most that it can save.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nestpipe.schedule import LOOKING_AHEAD

GROUPS: dict[str, tuple[str, ...]] = {
    "compute": ("compute", "weight_grad", "step"),
    "data": ("load", "move", "route"),
    "lookup": ("retrieve", "writeback"),
    "update": ("sync", "accumulate", "update"),
    "All2All": ("embed", "grad"),
    "all-reduce": ("reduce", "agree"),
    "between": ("between",),
}
"""The stages in the columns of the report; what of them is exposed adds up to the step."""

WORTH = 1.02
"""A change that makes a step less than so many times faster is not worth a line."""
AT_LIMIT = 1.05
SMALL = 0.05
"""A share of the step below which a thing is called small."""
UNEVEN = 1.2
"""The slowest worker's compute over the usual one's, from which on it is named."""
MANY_NEW = 0.2


@dataclass(frozen=True)
class Variant:
    """One way to run the recipe, and what its steps took on the slowest worker."""

    name: str
    schedule: str
    micro_batches: int
    round_ms: Sequence[float]
    """The median step of each round; rounds of all variants are in the same order."""
    only: str | None = None
    """compute or wire: a limit, which trains nonsense, and of whose steps nothing else counts."""
    samples_per_s: float = 0.0
    exposed: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds per step by group."""
    busy: Mapping[str, float] = field(default_factory=dict)

    @property
    def step_ms(self) -> float:
        return statistics.median(self.round_ms)

    @property
    def spread_ms(self) -> tuple[float, float]:
        return _middle(self.round_ms)

    @property
    def wire_ms(self) -> float:
        """What of the wire is exposed."""
        return self.exposed.get("All2All", 0.0) + self.exposed.get("all-reduce", 0.0)


@dataclass(frozen=True)
class Disk:
    """Of one worker, per step; `rows` in the end."""

    dram_rows: int
    rows: int
    read: float
    written: float


@dataclass(frozen=True)
class Figures:
    """All that is known about a recipe on some workers."""

    variants: Sequence[Variant]
    own: str
    """The variant that is the recipe as it stands."""
    workers: int = 1
    machines: int = 1
    threads: int = 1
    cores: int = 1
    """That a worker may use, if all workers of its machine use as many."""
    storage_ms: float = 0.0
    """The longer of retrieve and writeback, which have lanes of their own, under `serial`, on the slowest worker."""
    disk: Disk | None = None
    new_rows: float = 0.0
    """Share of a step's rows that no step had touched before."""
    compute_by_worker: Sequence[float] = ()

    def named(self, name: str) -> Variant:
        return next(v for v in self.variants if v.name == name)

    @property
    def runs(self) -> list[Variant]:
        """What could be trained with; not the limits."""
        return [v for v in self.variants if v.only is None]

    @property
    def serial(self) -> Variant:
        own = self.named(self.own)
        serial = [v for v in self.runs if v.schedule == "serial"]
        return min(serial, key=lambda v: abs(v.micro_batches - own.micro_batches))

    def alone(self, only: str) -> Variant | None:
        return next((v for v in self.variants if v.only == only), None)

    def limits(self, of: Variant) -> dict[str, float]:
        """What no schedule with as many micro-batches can go below, by what it is that takes the time."""
        compute, wire = self.alone("compute"), self.alone("wire")
        limits = {"compute": 0.0, "wire": wire.step_ms if wire else 0.0, "lookup": self.storage_ms}
        if compute is not None:
            limits["compute"] = compute.step_ms
            if of.micro_batches != compute.micro_batches:  # fewer are cheaper
                limits["compute"] = min(compute.step_ms, of.busy.get("compute", compute.step_ms))
        # by noise, or lanes that are in one another's way, a limit may come out above what has been done
        fastest = min(v.step_ms for v in self.runs if v.micro_batches == of.micro_batches)
        return {what: min(value, fastest) for what, value in limits.items()}


@dataclass(frozen=True)
class Change:
    """Something to do about the step, and the step that is to be expected of it."""

    text: str
    kind: str
    """measured; at most: computed from the limits; unsure: the rounds do not agree; unmeasured; none."""
    saves_ms: float = 0.0
    step_ms: float | None = None
    settings: Mapping[str, str | int] = field(default_factory=dict)
    """Keys of the recipe with their new values."""


@dataclass(frozen=True)
class Advice:
    outcome: list[str]
    changes: list[Change]
    """What was measured (or that nothing is faster) first, as the others come on top of it; these by what they save at most."""


@dataclass(frozen=True)
class Gain:
    """How many times faster than another, in the middle round and in the middle half of the rounds."""

    ratio: float
    low: float
    high: float
    rounds: int
    faster: int
    """Rounds in which it was faster."""

    @property
    def sure(self) -> bool:
        """Whether two that are alike would hardly be so many times in the same order: one in eight, as of three rounds all."""
        as_often = sum(math.comb(self.rounds, k) for k in range(self.faster, self.rounds + 1))
        return 8 * as_often <= 2**self.rounds


def compare(slow: Variant, fast: Variant) -> Gain:
    """Within rounds, since a machine may become slower from one to the next."""
    ratios = [a / b for a, b in zip(slow.round_ms, fast.round_ms)]
    return Gain(statistics.median(ratios), *_middle(ratios), len(ratios), sum(ratio > 1 for ratio in ratios))


def advise(figures: Figures) -> Advice:
    own = figures.named(figures.own)
    better, unsure = _choose(figures, own)
    base = better or own
    outcome = [
        _bound(figures, own),
        *_pieces(figures, own),
        *_crowded(figures, own),
        *_all2all(figures, base),
        *_all_reduce(figures, base),
        _lookup(figures, base),
        *_data(base),
        *_between(base),
        *_uneven(figures),
        *_new_rows(figures),
    ]
    changes = [
        *_schedule(figures, own, better, unsure),
        *_link(figures, base),
        *_dram(figures, base),
        *_device(figures, base),
        *_reading(figures, base),
    ]
    changes.sort(key=lambda change: (change.kind not in ("measured", "none"), -change.saves_ms))
    return Advice(outcome, changes)


def ms(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def _middle(values: Sequence[float]) -> tuple[float, float]:
    """The quartiles; of few values all of them."""
    if len(values) < 4:
        return min(values), max(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _choose(figures: Figures, own: Variant) -> tuple[Variant | None, Variant | None]:
    """The variant that is faster for sure; or else one that may be."""
    gains = {v.name: compare(own, v) for v in figures.runs if v.name != own.name}
    worth = [v for v in figures.runs if v.name != own.name and gains[v.name].ratio >= WORTH]
    sure = [v for v in worth if gains[v.name].sure]
    if sure:
        best = max(gains[v.name].ratio for v in sure)
        # of equals the one that changes least
        close = [v for v in sure if gains[v.name].ratio * 1.01 >= best]
        return min(close, key=lambda v: (v.micro_batches != own.micro_batches, v.micro_batches)), None
    return None, max(worth, key=lambda v: gains[v.name].ratio, default=None)


NAMES = {"compute": "compute", "wire": "the wire (All2All and all-reduce)", "lookup": "lookup"}


def _bound(figures: Figures, own: Variant) -> str:
    limits = figures.limits(own)
    what = max(limits, key=lambda name: limits[name])
    most, step = limits[what], own.step_ms
    takes = f"alone it takes {ms(most)} of {ms(step)} ms"
    floor = "no schedule can go below that" + (f" with N={own.micro_batches}" if own.micro_batches > 1 else "")
    if most * AT_LIMIT >= step:
        return f"{NAMES[what]} bounds the step: {takes}; {floor}"
    if most >= 0.5 * step:
        return f"{NAMES[what]} is the most of the step: {takes}; {floor}"
    alone = ", ".join(f"{NAMES[name]} {ms(value)}" for name, value in limits.items() if value)
    why = "it is long because they wait for one another"
    return f"nothing alone bounds the step of {ms(step)} ms: alone would take {alone}; {why}"


def _pieces(figures: Figures, own: Variant) -> list[str]:
    """What dividing a batch costs by itself."""
    alone = figures.alone("compute")
    whole = next((v for v in figures.runs if v.schedule == "serial" and v.micro_batches == 1), None)
    if alone is None or whole is None or alone.micro_batches == 1:
        return []
    more = alone.step_ms - whole.busy.get("compute", alone.step_ms)
    if more < SMALL * own.step_ms:
        return []
    return [
        f"micro-batches: compute takes {ms(alone.step_ms)} ms in {alone.micro_batches} pieces and "
        f"{ms(whole.busy['compute'])} in one: they cost {ms(more)} before they hide anything"
    ]


def _crowded(figures: Figures, own: Variant) -> list[str]:
    alone = figures.alone("compute")
    if alone is None or own.micro_batches != alone.micro_batches:
        return []
    beside = own.busy.get("compute", 0.0)
    if beside - alone.step_ms < max(SMALL * own.step_ms, 0.1 * alone.step_ms):
        return []
    return [
        f"compute takes {ms(beside)} ms beside the rest of the step and {ms(alone.step_ms)} alone: "
        "they share cores or memory"
    ]


def _hidden(serial: Variant, shown: Variant | None, group: str) -> str:
    """What another schedule makes of what `serial` exposes."""
    before = serial.exposed.get(group, 0.0)
    if shown is None:
        return f"{ms(before)} ms a step are exposed under {serial.name}"
    after = shown.exposed.get(group, 0.0)
    hidden = before - after
    if hidden < 0.1 * before:
        return f"{ms(before)} ms a step are exposed under {serial.name}, and {ms(after)} under {shown.name}"
    boundary = " at the boundary between batches" if shown.schedule == "nested" and group != "lookup" else ""
    rest = f"{ms(after)} stay exposed{boundary}" if after >= 0.1 else "nothing stays exposed"
    return f"{ms(before)} ms a step are exposed under {serial.name}; {shown.name} hides {ms(hidden)} of them, {rest}"


def _hiding(figures: Figures, base: Variant, schedules: Sequence[str]) -> Variant | None:
    """The variant that shows what can be hidden: the one that is recommended if it hides, or else the fastest that does."""
    if base.schedule in schedules:
        return base
    return min((v for v in figures.runs if v.schedule in schedules), key=lambda v: v.step_ms, default=None)


def _all2all(figures: Figures, base: Variant) -> list[str]:
    if figures.workers == 1:
        return ["All2All: none, with one worker: fwp and nested have nothing to hide"]
    serial, wire = figures.serial, figures.alone("wire")
    told = [f"All2All: {_hidden(serial, _hiding(figures, base, ('fwp', 'nested')), 'All2All')}"]
    waiting = serial.wire_ms - (wire.step_ms if wire is not None else serial.wire_ms)
    if wire is not None and waiting >= max(2 * SMALL * serial.step_ms, 0.3 * wire.step_ms):
        told.append(
            f"the wire alone needs {ms(wire.step_ms)} of the {ms(serial.wire_ms)} ms that All2All and all-reduce are exposed "
            f"under {serial.name}: some {ms(waiting)} are waiting for other workers to get there, or for a core"
        )
    return told


def _all_reduce(figures: Figures, base: Variant) -> list[str]:
    serial = figures.serial
    if figures.workers == 1 or serial.exposed.get("all-reduce", 0.0) < SMALL * serial.step_ms:
        return []
    return [f"dense all-reduce: {_hidden(serial, _hiding(figures, base, ('fwp', 'nested')), 'all-reduce')}"]


def _lookup(figures: Figures, base: Variant) -> str:
    small = figures.storage_ms < SMALL * base.step_ms
    if figures.disk is None and small:
        return f"lookup: rows come from DRAM, or go back, in at most {ms(figures.storage_ms)} ms a step: dbp has little to hide"
    shown = _hiding(figures, base, LOOKING_AHEAD)
    told = _hidden(figures.serial, shown, "lookup")
    if figures.disk is None:
        return f"lookup: {told}"
    rows = f"{figures.disk.read:,.0f} rows a step read from disk and {figures.disk.written:,.0f} written, per worker"
    return f"lookup: {rows}; {told}"


def _data(base: Variant) -> list[str]:
    exposed = base.exposed.get("data", 0.0)
    if exposed < SMALL * base.step_ms:
        return []
    why = "they come one after another" if base.schedule not in LOOKING_AHEAD else "they cannot keep up with the step"
    return [f"data: load, move and route are exposed for {ms(exposed)} ms a step under {base.name}: {why}"]


def _between(base: Variant) -> list[str]:
    exposed = base.exposed.get("between", 0.0)
    if exposed < 2 * SMALL * base.step_ms:
        return []
    return [
        f"between: for {ms(exposed)} ms a step of {base.name} no stage ran: handing over from lane to lane, as where there are "
        "too few cores or a step is very short"
    ]


def _uneven(figures: Figures) -> list[str]:
    times = figures.compute_by_worker
    if len(times) < 2:
        return []
    worst, others = max(times), statistics.median_low(times)
    if worst < UNEVEN * others or worst - others < SMALL * figures.named(figures.own).step_ms:
        return []
    return [
        f"worker {list(times).index(worst)} computes {ms(worst)} ms a step and others {ms(others)}: all wait for it, "
        "which shows as exposed All2All"
    ]


def _new_rows(figures: Figures) -> list[str]:
    if figures.new_rows < MANY_NEW:
        return []
    later = "from DRAM" if figures.disk is None else "from DRAM or disk"
    return [
        f"tables begin empty here: {figures.new_rows:.0%} of a step's rows were new.  Later in a run these come {later}, "
        "and lookup takes longer"
    ]


def _schedule(figures: Figures, own: Variant, better: Variant | None, unsure: Variant | None) -> list[Change]:
    limit = max(figures.limits(own).values())
    if better is not None:
        gain = compare(own, better)
        settings: dict[str, str | int] = {}
        if better.schedule != own.schedule:
            settings["pipeline.schedule"] = better.schedule
        if better.micro_batches != own.micro_batches:
            settings["pipeline.micro_batches"] = better.micro_batches
        keys = ", ".join(f"{k} = {_toml(v)}" for k, v in settings.items())
        result = "the result is the same, bit for bit"
        if "pipeline.micro_batches" in settings:
            result = "the result is the same but for rounding"
        step, range_ = better.step_ms, f"{gain.low:.2f} to {gain.high:.2f} in {gain.rounds} rounds"
        text = f"{keys}: {ms(step)} ms instead of {ms(own.step_ms)}, {gain.ratio:.2f}x ({range_}), measured; {result}"
        return [Change(text, "measured", own.step_ms - step, step, settings)]
    if unsure is not None:
        gain = compare(own, unsure)
        if gain.rounds < 2:
            why = "that is one round, which says nothing about noise"
        else:
            why = (
                f"but faster in only {gain.faster} of {gain.rounds} rounds ({gain.low:.2f}x to {gain.high:.2f}x), "
                "so they cannot be told apart"
            )
            if gain.faster == gain.rounds:
                why = f"but {gain.rounds} rounds are too few to tell"
        text = (
            f"perhaps {unsure.name}: {ms(unsure.step_ms)} ms against {ms(own.step_ms)}, {why}.  Use more --seconds, or a "
            "quieter machine"
        )
        return [Change(text, "unsure", 0.0, unsure.step_ms)]
    if limit * AT_LIMIT >= own.step_ms:
        over = max(0.0, own.step_ms / limit - 1)
        return [Change(f"nothing in [pipeline]: the step is within {max(over, 0.01):.0%} of its limit", "none")]
    text = f"nothing in [pipeline]: nothing else that was measured is faster than {own.name}"
    return [Change(f"{text}, which takes {own.step_ms / limit:.2f} of its limit", "none")]


def _toml(value: str | int) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _most(figures: Figures, base: Variant, what: str, exposed: float, share: float) -> float:
    """What can be saved at most if `what` took only 1 - `share` of its time: not more than the step waits for, nor more than
    what the other limits leave."""
    limits = figures.limits(base)
    others = max(value for name, value in limits.items() if name != what)
    return max(0.0, min(exposed, share * limits[what], base.step_ms - others))


def _at_most(base: Variant, text: str, saves: float) -> list[Change]:
    if saves < (WORTH - 1) * base.step_ms:
        return []
    of = f"of the {ms(base.step_ms)} ms of {base.name}"
    return [Change(f"{text} would save at most {ms(saves)} {of}", "at most", saves, base.step_ms - saves)]


def _link(figures: Figures, base: Variant) -> list[Change]:
    if figures.workers == 1:
        return []
    saves = _most(figures, base, "wire", base.wire_ms, 0.5)
    what = "a link of twice the rate"
    if figures.machines == 1:
        what = "rows travel by this machine's own cores, and no link; if that were twice as fast, it"
    return _at_most(base, what, saves)


def _dram(figures: Figures, base: Variant) -> list[Change]:
    disk = figures.disk
    if disk is None or disk.rows <= disk.dram_rows:
        return []
    saves = _most(figures, base, "lookup", base.exposed.get("lookup", 0.0), 1.0)
    return _at_most(base, f"more rows in DRAM than tables.dram_rows = {disk.dram_rows}", saves)


def _device(figures: Figures, base: Variant) -> list[Change]:
    limits = figures.limits(base)
    if limits["compute"] < max(limits.values()):
        return []
    saves = _most(figures, base, "compute", base.exposed.get("compute", 0.0), 0.5)
    found = _at_most(base, "a device or model that computes twice as fast", saves)
    if found and figures.cores >= 2 * figures.threads:
        text = f"train.threads = {figures.cores}: there are so many cores to a worker, which uses {figures.threads}"
        found.append(Change(f"{text}; not measured", "unmeasured", settings={"train.threads": figures.cores}))
    return found


def _reading(figures: Figures, base: Variant) -> list[Change]:
    if base.schedule not in LOOKING_AHEAD:
        return []
    return _at_most(base, "data that is read and routed faster", base.exposed.get("data", 0.0))
