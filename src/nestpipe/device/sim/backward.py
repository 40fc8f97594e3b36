"""Backward passes run on the calling thread, hence on its current stream.

torch gives each accelerator a thread of its own for backward, and a node of the graph the stream of its forward pass.  A
device made in Python has no say in the second, and an exception in that thread ends the process.  With multithreading off
for the call, the caller does all the work: on one stream, and an error is an ordinary one.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


def run_backward_on_the_caller() -> None:
    original = torch.autograd.graph._engine_run_backward

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return original(*args, **kwargs)

    torch.autograd.graph._engine_run_backward = run
    torch.autograd._engine_run_backward = run
