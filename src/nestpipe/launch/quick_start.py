"""Workers that start sooner: without torch's compiler, which no recipe uses."""

from __future__ import annotations

import sys
import types

import torch
import torch._compile
from torch.optim import SGD, Adagrad, Adam, AdamW


def leave_out_compiler() -> None:
    """Keeps optimizers from loading torch's compiler, which takes two seconds of CPU when a worker starts.

    torch loads it only to tell it what not to compile.  For processes of our own commands, before they make an optimizer: in a
    user's own script nothing is changed, and where the compiler is loaded already nothing is gained.
    """
    if "torch._dynamo" in sys.modules:
        return
    for method in vars(torch.optim.Optimizer).values():
        if isinstance(method, types.FunctionType) and method.__code__.co_filename == torch._compile.__file__:
            plain = method.__wrapped__  # type: ignore[attr-defined]
            plain.__dynamo_disable = plain  # where torch looks for the method that is not to be compiled
    for kind in (SGD, Adagrad, Adam, AdamW):
        step = vars(kind).get("step")
        if step is not None and step.__code__.co_name == "_use_grad":
            # What torch's own wrapper does, but for telling the compiler: without gradients, as none of ours is differentiable.
            kind.step = torch.no_grad()(step.__wrapped__)
