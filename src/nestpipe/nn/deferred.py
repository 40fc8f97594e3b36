"""Linear layers that can defer the gradients of their weights.  Outside a pipeline's own passes they are plain layers.

The backward pass of a linear layer makes two gradients.  The layer before it, and in the end the owners of rows, wait
for that of its input.  The gradient of its weight is not needed before the dense gradients are summed.  In the passes
of a `TrainPipeline` these layers make only the first, and keep what the second is made of until the stage `weight_grad`
(`dense/weight_grads.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from nestpipe.nn import torch_private


class WeightGrads(Protocol):
    """What a layer needs of the pipeline that defers its weight gradients (`dense/weight_grads.py`)."""

    keeping: bool
    """Whether a forward and backward pass of the pipeline is running."""

    def in_own_pass(self) -> bool:
        """Whether the backward pass that is running is the pipeline's, not one that the model runs by itself."""

    def may_defer(self, parameter: Tensor) -> bool:
        """Whether the gradient of this parameter may be deferred."""

    def add(self, parameter: nn.Parameter, grad: Tensor, input: Tensor | None) -> None:
        """Keeps the gradient of a layer's output and the layer's input (None for a bias)."""

    def input_grad(self, grad: Tensor, weight: nn.Parameter) -> Tensor:
        """grad @ weight."""


class DeferredLinear(nn.Linear):
    """An `nn.Linear` whose weight gradient a pipeline may make at the end of the batch.

    Until then its input and the gradient of its output must not change.  torch notices a change in place, but not one
    made by numpy or through `.data`.
    """

    weight_grads: WeightGrads | None = None

    def forward(self, input: Tensor) -> Tensor:
        deferred, parameters = self.weight_grads, (self.weight, self.bias)
        if deferred is None or not _can_defer(deferred, input, parameters):
            return super().forward(input)
        result: Tensor = _Layers.apply(deferred, (False,), input, *parameters)
        return result


class DeferredStack(nn.Sequential):
    """Linear layers, each with an `nn.ReLU` or without, as one autograd node that defers like `DeferredLinear`."""

    weight_grads: WeightGrads | None = None

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        if not self._is_stack():
            kinds = ", ".join(type(layer).__name__ for layer in layers)
            raise TypeError(f"DeferredStack takes nn.Linear, each followed by at most one nn.ReLU, not ({kinds})")

    def forward(self, input: Tensor) -> Tensor:
        deferred = self.weight_grads
        if deferred is None or not self._is_stack():
            return super().forward(input)
        relus: list[bool] = []
        parameters: list[nn.Parameter | None] = []
        for module in self:
            if isinstance(module, nn.Linear):
                parameters += [module.weight, module.bias]
                relus.append(False)
            else:
                relus[-1] = True
        if not _can_defer(deferred, input, parameters):
            return super().forward(input)
        result: Tensor = _Layers.apply(deferred, relus, input, *parameters)
        return result

    def _is_stack(self) -> bool:
        """Whether it may run as one node: users can add layers later, or hooks that must run between layers."""
        after_linear = False
        for module in self:
            is_linear = type(module) in (nn.Linear, DeferredLinear)
            if not (is_linear or (after_linear and type(module) is nn.ReLU)) or torch_private.has_hooks(module):
                return False
            after_linear = is_linear
        return len(self) > 0 and not torch_private.has_global_hooks()


def _can_defer(deferred: WeightGrads, input: Tensor, parameters: Sequence[Tensor | None]) -> bool:
    """Whether this forward pass is the pipeline's, an ordinary one, over parameters whose gradients may wait."""
    return (
        deferred.keeping
        and torch.is_grad_enabled()
        and _is_plain(input)
        and input.layout is torch.strided
        and input.dim() > 1
        and input.is_floating_point()
        and all(p is None or deferred.may_defer(p) for p in parameters)
        and not torch.is_autocast_enabled(input.device.type)
        and not torch.compiler.is_compiling()
        and not torch_private.is_transformed()
        and forward_ad.unpack_dual(input).tangent is None
    )


def _is_plain(input: Tensor) -> bool:
    """Whether it is no subclass of Tensor that gives operations another meaning.  The simulated device's gives them none."""
    return type(input) in (Tensor, nn.Parameter) or getattr(type(input), "is_plain", False)


class _Layers(torch.autograd.Function):
    """Linear layers one after another, each with or without a ReLU: the same operations as torch's own."""

    @staticmethod
    def forward(
        ctx: Any, deferred: WeightGrads, relus: Sequence[bool], input: Tensor, *parameters: Tensor | None
    ) -> Tensor:
        # Parameters are not saved through autograd: saved-tensor hooks could return others in their place.
        ctx.deferred, ctx.relus, ctx.parameters, ctx.versions = deferred, relus, parameters, _versions(parameters)
        x = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
        values = []
        for place, relu in enumerate(relus):
            weight, bias = parameters[2 * place : 2 * place + 2]
            assert weight is not None
            x = functional.linear(x, weight, bias)
            if relu:
                x.relu_()
            values.append(x)
        # The result belongs to the caller, who may change it in place unless a ReLU made it.
        ctx.save_for_backward(input, *(values if relus[-1] else values[:-1]))
        return x if input.dim() == 2 else torch_private.reshaped(x, [*input.shape[:-1], x.shape[-1]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, *values = ctx.saved_tensors
        if _versions(ctx.parameters) != ctx.versions:
            raise RuntimeError(
                "a linear layer's weight or bias was changed in place between its forward and backward pass"
            )
        if not ctx.deferred.in_own_pass():
            return None, None, *_plain_backward(ctx, input, grads[0])
        needed = ctx.needs_input_grad
        inputs = [input.detach().reshape(-1, input.shape[-1]), *values]  # detached, so that its graph can be freed
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        for place in reversed(range(len(ctx.relus))):
            weight, bias = ctx.parameters[2 * place : 2 * place + 2]
            if ctx.relus[place]:
                value = inputs[place + 1]
                ours = place < len(ctx.relus) - 1  # the last gradient is the caller's and must stay as it is
                grad = torch_private.relu_backward(grad, value, grad if ours else torch.empty_like(value))
            if needed[3 + 2 * place]:
                ctx.deferred.add(weight, grad, inputs[place])
            if bias is not None and needed[4 + 2 * place]:
                ctx.deferred.add(bias, grad, None)
            if place or needed[2]:
                grad = ctx.deferred.input_grad(grad, weight)
        return None, None, (grad.view(input.shape) if needed[2] else None), *(None for _ in ctx.parameters)


def _versions(parameters: Sequence[Tensor | None]) -> list[int]:
    return [0 if p is None else p._version for p in parameters]


def _plain_backward(ctx: Any, input: Tensor, grad: Tensor) -> list[Tensor | None]:
    """The gradients of plain layers, for a pass of the model's own (`torch.autograd.grad` in a forward pass)."""
    again = torch.is_grad_enabled()  # the gradient of this gradient is needed too
    needed = ctx.needs_input_grad[2:]
    with torch.enable_grad():
        x = input if again else input.detach().requires_grad_(needed[0])
        out = x
        for place, relu in enumerate(ctx.relus):
            out = functional.linear(out, *ctx.parameters[2 * place : 2 * place + 2])
            out = out.relu() if relu else out
        wanted = [t for t, need in zip((x, *ctx.parameters), needed) if need]
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=again))
    return [next(found) if need else None for need in needed]
