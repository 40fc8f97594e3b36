"""How many threads a product takes: one number for all of a process's threads."""

from __future__ import annotations

import torch


def join() -> None:
    """Has this thread compute with as many threads as `torch.set_num_threads` said.  A new thread that computes calls it first.

    That number is OpenMP's, which keeps it per thread, and torch brings it to a new thread only with the first loop of its own
    that may run in parallel.  A matrix product before that takes all cores, adds in another order and rounds differently.
    """
    torch.get_num_threads()
