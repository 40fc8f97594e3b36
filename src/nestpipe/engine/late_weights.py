"""Weight gradients of linear layers, put off to the end of a batch.

A backward pass through a linear layer makes two things: the gradient of its input, for which the layer before it is waiting and,
behind all layers, the rows' owners; and the gradient of its weight, for which nobody is waiting before the dense sum.  So the
backward passes of a batch make only the first and keep what the second is made of.  The stage `weights` makes it, while the last
row gradients and the next batch's first rows travel.  Each weight's gradient is summed in place, micro-batch by micro-batch in
their order, under every schedule alike.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from nestpipe.engine.dense import Bucket


class LateWeights:
    """What the linear layers of one model keep of the micro-batches of one batch."""

    def __init__(self, model: nn.Module) -> None:
        self._kept: dict[nn.Parameter, list[Kept]] = defaultdict(list)
        self.keeping = False
        self.layers = [module for module in model.modules() if _can_be_late(module)]
        for layer in self.layers:
            layer.__class__ = LateLinear
            layer.__dict__["late_weights"] = self

    @contextlib.contextmanager
    def keep(self) -> Iterator[None]:
        """Around the forward and backward pass of a micro-batch: within it, weights wait."""
        self.keeping = True
        try:
            yield
        finally:
            self.keeping = False

    def add(self, parameter: nn.Parameter, kept: Kept) -> None:
        self._kept[parameter].append(kept)

    def make(self, buckets: Sequence[Bucket], made: Callable[[int], None]) -> None:
        """Adds what was kept to the parameters' gradients, bucket by bucket, and says of each when it is final."""
        for number, bucket in enumerate(buckets):
            for parameter in bucket.parameters:
                for kept in self._kept.pop(parameter, ()):
                    kept.add_to(parameter)
            made(number)
        self.clear()

    def clear(self) -> None:
        """Drops what a batch that failed has left."""
        self._kept.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model is not this pipeline's: its layers are plain ones."""
        return None


class Kept:
    """Of one layer in one micro-batch."""

    __slots__ = ("_grad", "_input", "_version")

    def __init__(self, grad: Tensor, input: Tensor | None) -> None:
        self._grad, self._input = grad, input
        self._version = (grad._version, None if input is None else input._version)

    def add_to(self, parameter: nn.Parameter) -> None:
        """`parameter` is the weight where an input was kept, else the bias."""
        if self._version != (self._grad._version, None if self._input is None else self._input._version):
            raise RuntimeError(
                "the input or the gradient of a linear layer was changed in place after its backward pass: "
                "set pipeline.late_weights = false"
            )
        assert parameter.grad is not None
        grad = self._grad.reshape(-1, self._grad.shape[-1])
        if self._input is None:
            parameter.grad.add_(grad.sum(0))
        else:
            parameter.grad.addmm_(grad.t(), self._input.reshape(-1, self._input.shape[-1]))


class LateLinear(nn.Linear):
    """A linear layer of a model that a pipeline trains.  Anywhere else it is what it was before."""

    late_weights: LateWeights | None

    def forward(self, input: Tensor) -> Tensor:
        late = self.late_weights
        if late is None or not late.keeping or not self._plain(input):
            return functional.linear(input, self.weight, self.bias)
        result: Tensor = _Linear.apply(input, self.weight, self.bias, late)
        return result

    def _plain(self, input: Tensor) -> bool:
        """Nothing else looks at the gradient of the weight or of the bias on its way."""
        if not torch.is_grad_enabled() or torch.is_autocast_enabled(input.device.type) or torch.compiler.is_compiling():
            return False
        return not any(p is not None and (p._backward_hooks or _hooks_after(p)) for p in (self.weight, self.bias))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, late: LateWeights) -> Tensor:
        ctx.save_for_backward(input, weight, bias)
        ctx.late = late
        return functional.linear(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        input, weight, bias = ctx.saved_tensors
        (grad,) = grads
        if ctx.needs_input_grad[1]:
            ctx.late.add(weight, Kept(grad, input.detach()))
        if bias is not None and ctx.needs_input_grad[2]:
            ctx.late.add(bias, Kept(grad, None))
        return (grad @ weight if ctx.needs_input_grad[0] else None), None, None, None


def _hooks_after(parameter: nn.Parameter) -> bool:
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


def _can_be_late(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, LateLinear) and any(p.requires_grad for p in module.parameters(recurse=False))
