"""Workers that start sooner: without torch's compiler, which no recipe uses."""

from __future__ import annotations

import sys
import types

import torch
import torch._compile
from torch.optim import SGD, Adagrad, Adam, AdamW


def leave_out_compiler() -> None:
    """Keeps torch's optimizers from importing torch's compiler, which they only tell what not to compile.

    Only for processes of our own commands, before they make an optimizer; a user's script is left alone.  Does nothing where the
    compiler is loaded already.  tests/launch/test_quick_start.py compares the optimizers with torch's own, bit for bit.
    """
    # Worth a patch of torch's private functions: there is no public way, and the import costs every worker about 2 s of CPU.
    # 20 steps of dlrm on 2 shared cores, medians of 5 interleaved runs, with the patch and without: one worker 5.6 and 8.0 s of
    # CPU (8.5 and 12.3 s elapsed), two workers 12.4 and 16.2 s of CPU (18.0 and 19.7 s elapsed).
    if "torch._dynamo" in sys.modules:
        return
    for method in vars(torch.optim.Optimizer).values():
        if isinstance(method, types.FunctionType) and method.__code__.co_filename == torch._compile.__file__:
            plain = method.__wrapped__  # type: ignore[attr-defined]
            plain.__dynamo_disable = plain  # where torch looks for the method that is not to be compiled
    for kind in (SGD, Adagrad, Adam, AdamW):
        step = vars(kind).get("step")
        if step is not None and step.__code__.co_name == "_use_grad":
            # What torch's own wrapper does, except for telling the compiler: no gradients, as none of ours is differentiable.
            kind.step = torch.no_grad()(step.__wrapped__)
