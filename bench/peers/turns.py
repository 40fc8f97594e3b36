"""Turns: the workers of all rungs are alive at once, and one rung at a time trains a few steps.

A machine that others use too is fast in one minute and slow in the next.  Rungs that take turns of a second or two meet the same
minutes, so that ratios within a round mean something.  The ladder makes the file turn-K in a rung's folder, its workers train,
and each answers with done-K-RANK.  Between its turns it stops them by signal, for which they leave pid-RANK: threads that wake
a hundred times a second to look for messages would take a tenth of the machine from the rung whose turn it is.  Standard
library only: every peer's environment reads this.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

PATIENCE_SECONDS = 900.0
"""A worker whose turn does not come for so long ends: whoever made the turns is gone."""
_POLL_SECONDS = 0.01


PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Linux: the kernel ends this process when its parent ends, even where it has been stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Turns:
    def __init__(self, folder: str, rank: int):
        self.folder = Path(folder)
        self.rank = rank
        end_with_parent()
        (self.folder / f"pid-{rank}").write_text(str(os.getpid()))

    def wait(self, turn: int) -> None:
        """Until this rung's turn comes.  Costs next to no CPU meanwhile."""
        until = time.monotonic() + PATIENCE_SECONDS
        while not (self.folder / f"turn-{turn}").exists():
            if time.monotonic() > until or os.getppid() == 1:
                raise SystemExit(f"no turn {turn} came: the ladder is gone")
            time.sleep(_POLL_SECONDS)

    def done(self, turn: int) -> None:
        (self.folder / f"done-{turn}-{self.rank}").touch()
