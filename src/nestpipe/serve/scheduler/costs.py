"""What steps take, learnt while serving."""

from __future__ import annotations

from statistics import median

from nestpipe.serve.scheduler.jobs import RankJob

MEMORY = 31
"""Steps of a kind that count: the median of so many forgets a stall at once and follows a machine that has slowed down."""
MARGIN = 1.25


class Costs:
    """Seconds of a block, of opening a ranking with its first slice, and of each further slice.  0 until seen."""

    def __init__(self, score_slice: int) -> None:
        self._slice = score_slice
        self._seen: dict[str, list[float]] = {"block": [], "open": [], "slice": []}
        self._median = dict.fromkeys(self._seen, 0.0)

    def observe(self, kind: str, seconds: float) -> None:
        seen = self._seen[kind]
        seen.append(seconds)
        del seen[:-MEMORY]
        self._median[kind] = median(seen)

    def of_blocks(self, count: int) -> float:
        return count * self._median["block"]

    def left(self, job: RankJob) -> float:
        """What a ranking still takes, with a margin: half of all steps take longer than their median."""
        slices = -(-max(0, len(job.candidates) - job.scored) // self._slice)
        opening = self._median["open"] if job.ranking is None else self._median["slice"]
        seconds = job.missing * self._median["block"] + opening + max(0, slices - 1) * self._median["slice"]
        return MARGIN * seconds
