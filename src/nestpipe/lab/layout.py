"""Which workers are on which host."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """`hosts` with `per_host` workers each.  Ranks go host by host, as torchrun gives them."""

    hosts: int
    per_host: int

    @property
    def workers(self) -> int:
        return self.hosts * self.per_host

    def host_of(self, rank: int) -> int:
        return rank // self.per_host

    def words(self) -> str:
        """For titles: `4 workers`, or `2 hosts of 2 workers`."""
        if self.hosts == 1 or self.per_host == 1:
            return f"{self.workers} workers"
        return f"{self.hosts} hosts of {self.per_host} workers"
