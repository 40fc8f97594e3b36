"""The figures of a simulated run: its step, what it waited for, speedup and scaling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nestpipe.schedule import build_by
from nestpipe.schedule.parts import SHARES, divide
from nestpipe.schedule.timeline import Timeline
from nestpipe.sim.clock import simulate
from nestpipe.sim.costs import Cluster
from nestpipe.sim.profile import Profile
from nestpipe.sim.systems import SYSTEMS, System
from nestpipe.sim.topology import FULL_MESH, Grouped, Topology, parse

STEPS = 50
WARMUP = 10
"""Steps that fill the pipeline and do not count."""


@dataclass(frozen=True)
class StepFigures:
    """One system on one cluster; milliseconds per step of the slowest worker."""

    system: str
    workers: int
    micro_batches: int
    batch: int
    step_ms: float
    lookup_ms: float
    """Exposed, as are the next three."""
    exposed_comm_ms: float
    dense_ms: float
    compute_ms: float
    raw_comm_ms: float
    """All All2All, hidden or not."""
    group_size: int
    """Workers that share one copy of the tables; each holds this part of them."""
    busiest_lane: str
    """Other than compute."""
    busiest_lane_ms: float

    @property
    def qps(self) -> float:
        return 1e3 * self.workers * self.batch / self.step_ms


@dataclass(frozen=True)
class Settings:
    """What a user can vary."""

    micro_batches: int | None = None
    batch: int | None = None
    link: float = 1.0
    skew: float = 0.0
    topology: str = FULL_MESH
    """For systems that have no groups of their own."""
    steps: int = STEPS
    group_size: int | None = None
    """Workers of a group, for systems with groups; None: the profile's number of groups."""

    def __post_init__(self) -> None:
        counts = (("--micro", self.micro_batches), ("--batch", self.batch), ("--group-size", self.group_size))
        for flag, value in counts:
            if value is not None and value < 1:
                raise ValueError(f"{flag} must be at least 1, not {value}")
        if not 0 < self.link < math.inf:
            raise ValueError(f"--link-speed must be above 0, not {self.link}")
        if not 0 <= self.skew < math.inf:
            raise ValueError(f"--skew must be at least 0, not {self.skew}")
        if self.steps <= WARMUP:
            raise ValueError(f"--steps must be more than {WARMUP}, which fill the pipeline, not {self.steps}")


def run(system: System, profile: Profile, workers: int, settings: Settings = Settings()) -> StepFigures:  # noqa: B008
    """Simulates a system and measures it as the engine measures a run."""
    cluster = cluster_of(system, profile, workers, settings)
    actions = build_by(system.builder, settings.steps, cluster.micro_batches, cluster.options)
    lanes: dict[str, float] = {}
    raw = 0.0
    ends: list[float] = []
    timeline = Timeline()
    begin = 0.0
    counted = settings.steps - WARMUP
    for one in simulate(actions, cluster.cost(), workers, profile.machine_cores / workers, cluster.burst()):
        action, start, stop = one.action, float(one.start[0]) / 1e3, float(one.stop[0]) / 1e3
        timeline.add(action, start, stop)
        if action.batch >= WARMUP:
            lanes[action.lane] = lanes.get(action.lane, 0.0) + 1e3 * (stop - start) / counted
            raw += 1e3 * (stop - start) / counted if action.stage in SHARES["all2all"] else 0.0
        if action.stage == "step":
            ends.append(float(one.stop.max()))
            timeline.close_step(action.name, begin, stop)
            if len(ends) == WARMUP:
                timeline.restart()
            timeline.forget(action.batch - 4)
            begin = stop
    exposed = divide({stage: kinds["exposed_ms"] for stage, kinds in timeline.report().items()})
    others = {lane: ms for lane, ms in lanes.items() if lane != "compute"}
    busiest = max(others, key=lambda lane: others[lane])
    return StepFigures(
        system.name,
        workers,
        cluster.micro_batches,
        cluster.batch,
        (ends[-1] - ends[WARMUP - 1]) / counted,
        exposed["lookup"],
        exposed["all2all"],
        exposed["dense"],
        exposed["compute"],
        raw,
        cluster.topology.group_size,
        busiest,
        others[busiest],
    )


def cluster_of(system: System, profile: Profile, workers: int, settings: Settings) -> Cluster:
    if workers < 1:
        raise ValueError(f"--workers must be at least 1, not {workers}")
    topology = _grouped(profile, workers, settings) if system.grouped else parse(settings.topology, workers)
    micro_batches = (settings.micro_batches or profile.micro_batches) if system.pipelined else 1
    batch = settings.batch or profile.samples
    if micro_batches > batch:
        raise ValueError(f"--micro {micro_batches} is more than the {batch} samples of a batch")
    replicates = system.copies == "exact"
    return Cluster(profile, topology, micro_batches, batch, settings.link, replicates, settings.skew)


def _grouped(profile: Profile, workers: int, settings: Settings) -> Topology:
    size = settings.group_size
    if size is None:
        return parse(f"groups:{profile.groups}", workers)
    if workers % size:
        raise ValueError(f"--group-size {size} does not divide {workers} workers")
    return Grouped(workers, groups=workers // size)


def table(
    profile: Profile,
    workers: Sequence[int],
    names: Sequence[str] = tuple(SYSTEMS),
    settings: Settings = Settings(),  # noqa: B008
) -> list[dict[str, Any]]:
    """A row per system and number of workers, with speedup over `torchrec` and scaling from the reference."""
    known: dict[tuple[str, int], StepFigures] = {}

    def figures(name: str, count: int) -> StepFigures:
        if (name, count) not in known:
            known[name, count] = run(SYSTEMS[name], profile, count, settings)
        return known[name, count]

    rows = []
    for count in workers:
        for name in names:
            one = figures(name, count)
            at_first = figures(name, profile.reference_workers)
            rows.append(
                {
                    **asdict(one),
                    "speedup": figures("torchrec", count).step_ms / one.step_ms,
                    "qps": one.qps,
                    "scaling_efficiency": at_first.step_ms / one.step_ms,
                }
            )
    return rows
