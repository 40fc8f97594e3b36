"""Weight gradients of linear layers, put off to the end of a batch.

A backward pass through a linear layer makes two things: the gradient of its input, for which the layer before it is waiting and,
behind all layers, the owners of rows; and the gradient of its weight, for which nobody waits before the dense sum.  So the
backward passes of a batch make only the first, and keep what the second is made of.  The stage `weights` makes it, while the last
row gradients and the next batch's first rows travel.  Every weight's gradient is summed in place, micro-batch by micro-batch in
their order, under every schedule alike.

A stack of linear layers with ReLU between them is one node for autograd, which saves much of what a small micro-batch costs.
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

Kept = tuple[Tensor, Tensor | None, int, int]
"""Of one layer in one micro-batch: gradient of the output; input (None for a bias); their versions, which must not change."""


class LateWeights:
    """What the linear layers of one model keep of the micro-batches of one batch.

    Layers become `LateLinear` and `LateStack` in place: the same parameters under the same names.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept: dict[nn.Parameter, list[Kept]] = defaultdict(list)
        self.keeping = False
        self.layers = [module for module in model.modules() if _is_linear(module) and _trains(module)]
        stacks = [module for module in model.modules() if _is_stack(module) and _trains(module)]
        for kind, found in ((LateLinear, self.layers), (LateStack, stacks)):
            for module in found:
                module.__class__ = kind
                module.__dict__["late_weights"] = self

    @contextlib.contextmanager
    def keep(self) -> Iterator[None]:
        """Around the forward and backward pass of a micro-batch: within it, weights wait."""
        self.keeping = True
        try:
            yield
        finally:
            self.keeping = False

    def add(self, parameter: nn.Parameter, grad: Tensor, input: Tensor | None) -> None:
        self._kept[parameter].append((grad, input, grad._version, 0 if input is None else input._version))

    def make(self, buckets: Sequence[Bucket], made: Callable[[int], None]) -> None:
        """Adds what was kept to the parameters' gradients, bucket by bucket, and says of each when it is final."""
        for number, bucket in enumerate(buckets):
            for parameter in bucket.parameters:
                for kept in self._kept.pop(parameter, ()):
                    _add_to(parameter, *kept)
            made(number)
        if self._kept:
            raise RuntimeError("a linear layer got parameters after the pipeline was made: make a new TrainPipeline")

    def clear(self) -> None:
        """Drops what a batch that failed has left."""
        self._kept.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model is not this pipeline's: its layers are plain ones."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _add_to(parameter: nn.Parameter, grad: Tensor, input: Tensor | None, grad_version: int, input_version: int) -> None:
    if grad._version != grad_version or (input is not None and input._version != input_version):
        raise RuntimeError(
            "the input or the gradient of a linear layer was changed in place after its backward pass: "
            "set pipeline.late_weights = false"
        )
    assert parameter.grad is not None
    if input is None:
        parameter.grad.add_(grad.sum(0))
    else:
        parameter.grad.addmm_(grad.t(), input)


class LateLinear(nn.Linear):
    """A linear layer of a model that a pipeline trains.  Anywhere else it is what it was before."""

    late_weights: LateWeights | None

    def forward(self, input: Tensor) -> Tensor:
        late = self.late_weights
        if late is None or not late.keeping or not _possible(input) or _looked_at(self):
            return functional.linear(input, self.weight, self.bias)
        result: Tensor = _Layers.apply(late, (False,), input, self.weight, self.bias)
        return result


class LateStack(nn.Sequential):
    """A stack of linear layers, with ReLU behind some of them, as one step of autograd's."""

    late_weights: LateWeights | None

    def forward(self, input: Tensor) -> Tensor:
        late = self.late_weights
        if late is None or not late.keeping or not _possible(input) or not _is_stack(self):
            return super().forward(input)
        modules = list(self._modules.values())
        relus: list[bool] = []
        parameters: list[nn.Parameter | None] = []
        for module in modules:
            if _hooked(module) or (isinstance(module, nn.Linear) and _looked_at(module)):
                return super().forward(input)
            if isinstance(module, nn.Linear):
                parameters += [module.weight, module.bias]
                relus.append(False)
            else:
                relus[-1] = True
        result: Tensor = _Layers.apply(late, relus, input, *parameters)
        return result


class _Layers(torch.autograd.Function):
    """Linear layers one after another, each with a ReLU behind it or without: the same operations as torch's own."""

    @staticmethod
    def forward(
        ctx: Any, late: LateWeights, relus: Sequence[bool], input: Tensor, *parameters: nn.Parameter | None
    ) -> Tensor:
        ctx.late, ctx.relus, ctx.shape = late, relus, input.shape
        ctx.parameters = parameters  # not saved: who looks after saved tensors may give back others in their place
        x = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
        values = [x]
        for place, relu in enumerate(relus):
            weight, bias = parameters[2 * place : 2 * place + 2]
            assert weight is not None
            x = functional.linear(x, weight, bias)
            if relu:
                x.relu_()
            values.append(x)
        ctx.save_for_backward(*values)
        return x if input.dim() == 2 else x.view(*input.shape[:-1], x.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.relus)
        values, parameters = ctx.saved_tensors, ctx.parameters
        needed = ctx.needs_input_grad
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        passed: Tensor | None = None
        for place in reversed(range(count)):
            weight, bias = parameters[2 * place : 2 * place + 2]
            if ctx.relus[place]:
                grad = torch.ops.aten.threshold_backward(grad, values[place + 1], 0)
            if needed[3 + 2 * place]:
                ctx.late.add(weight, grad, values[place].detach())  # what came before may be freed
            if bias is not None and needed[4 + 2 * place]:
                ctx.late.add(bias, grad, None)
            if place or needed[2]:
                grad = grad @ weight
                passed = grad.view(ctx.shape) if place == 0 else None
        return (None, None, passed, *(None for _ in parameters))


def _possible(input: Tensor) -> bool:
    """Whether this is a plain backward pass in the making."""
    if not torch.is_grad_enabled() or input.shape[0] == 0 or not input.is_floating_point():
        return False
    return not (torch.is_autocast_enabled(input.device.type) or torch.compiler.is_compiling())


def _looked_at(layer: nn.Linear) -> bool:
    """Whether somebody wants to see the gradient of its weight or bias on its way."""
    return any(
        p is not None and (p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None))
        for p in (layer.weight, layer.bias)
    )


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _is_linear(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, LateLinear)


def _is_stack(module: nn.Module) -> bool:
    """Two linear layers or more, each followed by at most one ReLU, and nothing else."""
    if type(module) not in (nn.Sequential, LateStack):
        return False
    inside = list(module.children())
    linear = [_is_linear(one) for one in inside]
    return (
        sum(linear) > 1
        and linear[0]
        and all(one or (type(inside[i]) is nn.ReLU and linear[i - 1]) for i, one in enumerate(linear))
    )


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())
