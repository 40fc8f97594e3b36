"""The figures that the paper reports (arXiv 2604.06956), and how far the simulated cluster is from them.

Figures come from readers' notes on the paper; "~" marks those noted as rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nestpipe.sim.figures import Settings, run
from nestpipe.sim.profile import Profile
from nestpipe.sim.systems import SYSTEMS

PROFILE = "paper-npu"
WORKERS, FEW = 1536, 128
PERCENT, POINTS = 5.0, 2.0
"""How far off a promised figure may be: in percent, and in percentage points for a percentage."""


@dataclass(frozen=True)
class Published:
    what: str
    value: float
    simulated: Callable[[Simulated], float]
    unit: str = "ms"
    promised: bool = True
    """Whether the profile promises to reproduce it; other figures are only shown with their error."""


class Simulated:
    """Simulates each system once and keeps its figures."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._known: dict[tuple[str, int, int | None], dict[str, float]] = {}

    def __call__(self, system: str, what: str, workers: int = WORKERS, micro_batches: int | None = None) -> float:
        key = (system, workers, micro_batches)
        if key not in self._known:
            figures = run(SYSTEMS[system], self._profile, workers, Settings(micro_batches=micro_batches))
            self._known[key] = {**vars(figures), "qps": figures.qps}
        return self._known[key][what]

    def efficiency(self, system: str, workers: int = WORKERS) -> float:
        """Scaling efficiency in percent, from `FEW` workers."""
        return 100 * self(system, "step_ms", FEW) / self(system, "step_ms", workers)

    def share(self, system: str, what: str, workers: int) -> float:
        return 100 * self(system, what, workers) / self(system, "step_ms", workers)


def _step(system: str, value: float) -> Published:
    return Published(f"{system}: step", value, lambda of: of(system, "step_ms"))


def _efficiency(system: str, value: float) -> Published:
    return Published(f"{system}: scaling from 128", value, lambda of: of.efficiency(system), "%")


FIGURES: tuple[Published, ...] = (
    _step("torchrec", 5793.83),
    _step("2d-sp", 4914.01),
    _step("uniemb", 2919.76),
    _step("nestpipe", 1895.98),
    Published("dbp: lookup exposed ~", 36.0, lambda of: of("dbp", "lookup_ms")),
    Published("dbp: All2All exposed ~", 1169.0, lambda of: of("dbp", "exposed_comm_ms")),
    Published("fwp: lookup exposed ~", 2870.0, lambda of: of("fwp", "lookup_ms")),
    Published("fwp: All2All exposed ~", 160.0, lambda of: of("fwp", "exposed_comm_ms")),
    Published("nestpipe+2d-sp: samples/s", 4.32e5, lambda of: of("nestpipe+2d-sp", "qps"), "/s"),
    _efficiency("torchrec", 44.34),
    _efficiency("2d-sp", 49.32),
    _efficiency("uniemb", 67.62),
    _efficiency("nestpipe", 94.07),
    _efficiency("nestpipe+2d-sp", 97.17),
    Published("nestpipe: All2All, all of it", 1185.0, lambda of: of("nestpipe", "raw_comm_ms")),
    Published("nestpipe+2d-sp: All2All, all of it", 452.34, lambda of: of("nestpipe+2d-sp", "raw_comm_ms")),
    Published("nestpipe+2d-sp: All2All exposed", 55.64, lambda of: of("nestpipe+2d-sp", "exposed_comm_ms")),
    Published("torchrec: lookup", 2870.99, lambda of: of("torchrec", "lookup_ms"), promised=False),
    Published("torchrec: All2All", 1207.85, lambda of: of("torchrec", "exposed_comm_ms"), promised=False),
    Published(
        "torchrec, 128: lookup's share", 24.4, lambda of: of.share("torchrec", "lookup_ms", FEW), "%", promised=False
    ),
    Published(
        "torchrec, 128: All2All's share",
        9.2,
        lambda of: of.share("torchrec", "exposed_comm_ms", FEW),
        "%",
        promised=False,
    ),
    Published("2d-sp: All2All", 438.36, lambda of: of("2d-sp", "exposed_comm_ms"), promised=False),
    Published("uniemb: lookup exposed", 23.49, lambda of: of("uniemb", "lookup_ms"), promised=False),
    Published("uniemb, 512: scaling from 128", 89.21, lambda of: of.efficiency("uniemb", 512), "%", promised=False),
    Published("nestpipe: lookup exposed", 30.19, lambda of: of("nestpipe", "lookup_ms"), promised=False),
    Published("nestpipe: All2All exposed", 154.23, lambda of: of("nestpipe", "exposed_comm_ms"), promised=False),
    Published(
        "nestpipe, micro-batches of 16, no clustering: All2All, all of it",
        1331.33,
        lambda of: of("nestpipe", "raw_comm_ms", micro_batches=32),
        promised=False,
    ),
    Published(
        "nestpipe, micro-batches of 16: All2All exposed",
        27.71,
        lambda of: of("nestpipe", "exposed_comm_ms", micro_batches=32),
        promised=False,
    ),
)


@dataclass(frozen=True)
class Comparison:
    what: str
    unit: str
    published: float
    simulated: float
    promised: bool

    @property
    def error(self) -> float:
        """In percent of the published figure; for percentages, in points."""
        if self.unit == "%":
            return self.simulated - self.published
        return 100 * (self.simulated / self.published - 1)

    @property
    def holds(self) -> bool:
        return not self.promised or abs(self.error) <= (POINTS if self.unit == "%" else PERCENT)


def compare(profile: Profile, figures: Sequence[Published] = FIGURES) -> list[Comparison]:
    simulated = Simulated(profile)
    return [Comparison(f.what, f.unit, f.value, f.simulated(simulated), f.promised) for f in figures]
