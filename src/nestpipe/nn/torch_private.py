"""Private parts of torch that deferred weight gradients need, each with the reason why nothing public will do.

All of torch's underscored names in `nn/` and `dense/` are here, except `Tensor._version`, the counter of in-place
changes that autograd's own documentation describes.  `tests/nn/test_torch_private.py` fails on a torch in which one of
them has changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook


def backward_pass() -> int:
    """The number of the backward pass that runs on this thread, -1 outside of one.

    A model may run passes of its own, before or inside the pipeline's.  Only their number tells them apart.
    """
    number: int = torch._C._current_graph_task_id()
    return number


def is_transformed() -> bool:
    """Whether `torch.func` (vmap, grad, jvp) is at work.  The Python type of its tensors does not tell."""
    active: bool = torch._C._are_functorch_transforms_active()
    return active


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module calls more than its class's `forward`.  torch has no public list of hooks."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def has_global_hooks() -> bool:
    """Whether hooks are registered for all modules."""
    registered: bool = _has_any_global_hook()
    return registered


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether a hook sees the parameter's gradient, before or after it is accumulated."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def reshaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor in another shape, not as a view: users may not change a view from a custom function in place."""
    result: Tensor = torch.ops.aten._unsafe_view(tensor, list(shape))
    return result


def relu_backward(grad: Tensor, value: Tensor, out: Tensor) -> Tensor:
    """out = grad where value > 0, else 0.  `out` may be `grad`.

    `grad.masked_fill_(value <= 0, 0)` gives the same bits but takes 4.2 times as long (3.9 to 4.7): 0.98 ms instead of
    0.22 for 256 x 512, where the layer's product takes 2 (`python bench/kernels.py`, 2026-11-17, 60 turns).
    """
    result: Tensor = torch.ops.aten.threshold_backward.grad_input(grad, value, 0, grad_input=out)
    return result
