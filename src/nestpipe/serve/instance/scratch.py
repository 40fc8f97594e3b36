"""Memory for the blocks of one ranking for which the arena has no room."""

from __future__ import annotations

import numpy as np

from nestpipe.serve.cache.arena import Arena
from nestpipe.serve.scheduler.jobs import RankJob


class Scratch:
    """A whole window's blocks, for one ranking at a time."""

    def __init__(self, blocks: int, block_floats: int) -> None:
        slots = max(1, blocks)
        self._arena = Arena(slots * (-(-block_floats * 4 // 64) * 64), block_floats * 4)
        self._owner: RankJob | None = None

    def enter(self, job: RankJob) -> bool:
        """Whether the memory is the job's now."""
        if self._owner is None:
            self._owner = job
        return self._owner is job

    def block(self, index: int) -> np.ndarray:
        return self._arena.view(index, np.float32)

    def leave(self, job: RankJob) -> bool:
        """Gives the memory up; False if the job did not have it."""
        if self._owner is not job:
            return False
        self._owner = None
        return True
