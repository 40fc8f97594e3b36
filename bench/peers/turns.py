"""Turns: the workers of all rungs are alive at once, and one rung at a time trains a few steps.

A shared machine is fast in one minute and slow in the next.  Rungs that take turns of a second or two see the same
minutes, so that ratios within a round mean something.  The ladder creates the file turn-K in a rung's folder, the
workers train, and each answers with done-K-RANK.  Between turns the ladder stops them with a signal, for which they
write pid-RANK: their threads look for messages a hundred times a second and would take a tenth of the machine from the
rung that trains.  Needs only the standard library, as every peer's environment reads this.
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

PATIENCE_SECONDS = 900.0
"""A worker that waits longer for its turn ends: the ladder is gone."""
_POLL_SECONDS = 0.01
PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """On Linux, makes the kernel end this process when its parent ends, even if it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Turns:
    def __init__(self, folder: str, rank: int):
        self.folder = Path(folder)
        self.rank = rank
        end_with_parent()
        (self.folder / f"pid-{rank}").write_text(str(os.getpid()))

    def wait(self, turn: int) -> None:
        """Waits until this rung's turn comes, with next to no CPU."""
        until = time.monotonic() + PATIENCE_SECONDS
        while not (self.folder / f"turn-{turn}").exists():
            if time.monotonic() > until or os.getppid() == 1:
                raise SystemExit(f"no turn {turn} came: the ladder is gone")
            time.sleep(_POLL_SECONDS)

    def done(self, turn: int) -> None:
        (self.folder / f"done-{turn}-{self.rank}").touch()
