"""What a run on the simulated device showed: races, host syncs by place, launches.  Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    races: list[str]
    """One line for each pair of places whose accesses nothing orders, in the order found, without repeats."""
    host_syncs: dict[str, dict[str, int]]
    """How often a host thread waited for the device: by thread name, then by "why at file:line"."""
    launches: int
    """Kernels and copies issued."""
    annotations: dict[str, int]
    """Reasons of `disjoint` blocks that issued anything, with the number of pairs of accesses that each one silenced."""

    @property
    def total(self) -> int:
        """Host syncs of all threads and places."""
        return sum(count for places in self.host_syncs.values() for count in places.values())
