"""Who takes part in an exchange: all workers of a run, or some of them."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist


class Members(Protocol):
    """Workers that exchange messages, numbered from 0, and this one among them.  `World` is one, and so are its parts."""

    @property
    def rank(self) -> int:
        """The number of this worker among them."""

    @property
    def size(self) -> int: ...

    @property
    def groups(self) -> dict[str, dist.ProcessGroup]:
        """A process group for every lane that communicates; none where there is nobody else."""

    @property
    def timeout(self) -> float: ...

    def run_rank(self, member: int) -> int:
        """The rank in the run of one of them."""
