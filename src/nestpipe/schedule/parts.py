"""What a step is spent on: exposed time of stages, summed into the shares of the published figures."""

from __future__ import annotations

from collections.abc import Mapping

from nestpipe.schedule.stages import STAGES
from nestpipe.schedule.timeline import BETWEEN

SHARES: dict[str, tuple[str, ...]] = {
    share: tuple(stage.name for stage in STAGES.values() if stage.share == share)
    for share in ("lookup", "all2all", "dense", "compute")
}
SHARES["compute"] += (BETWEEN,)


def divide(exposed: Mapping[str, float]) -> dict[str, float]:
    """Exposed time of each share, from that of each stage."""
    return {share: sum(exposed.get(stage, 0.0) for stage in stages) for share, stages in SHARES.items()}
