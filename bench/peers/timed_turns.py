"""Steps timed turn by turn, in one way for ours and for peers.  Needs only the standard library.

Memory that malloc keeps from step to step matters as much as arithmetic here.  All variants are alive at once, so each gives its
memory back after a turn.  A turn begins with steps that are not timed, until no more pages have to be taken from the system, or
as many in every step.
"""

import ctypes
import resource
import time

from turns import Turns

MOST_UNTIMED = 4
FEW_FAULTS = 2_000


def page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def settle(step):
    """Takes steps until page faults no longer become fewer."""
    before = float("inf")
    for _ in range(MOST_UNTIMED):
        start = page_faults()
        step()
        faults = page_faults() - start
        if faults <= FEW_FAULTS or faults > 0.8 * before:
            return
        before = faults


def give_back():
    """Returns memory that malloc holds and nobody uses to the system.  Nothing happens without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class TimedTurns(Turns):
    def take(self, count, steps, step_of, peak):
        """Turns 1 to `count`, of `steps` timed steps each; `step_of(turn)` takes one step.  `peak()` is the core's FLOP/s.

        A turn gives seconds a step, the peak beside it, and page faults a step.
        """
        taken = []
        for turn in range(1, count + 1):
            self.wait(turn)
            settle(lambda turn=turn: step_of(turn))
            flops = peak()
            faults, start = page_faults(), time.perf_counter()
            for _ in range(steps):
                step_of(turn)
            seconds = (time.perf_counter() - start) / steps
            taken.append({"seconds": seconds, "peak": flops, "faults": (page_faults() - faults) / steps})
            self.done(turn)
        return taken

    def done(self, turn):
        """Gives memory back first: a variant that waits must not hold gigabytes that others need."""
        give_back()
        super().done(turn)
