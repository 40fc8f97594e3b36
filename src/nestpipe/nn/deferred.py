"""Linear layers that can leave the gradients of their weights for later; plain ones anywhere but in a pipeline's own passes.

A backward pass through a linear layer makes two things: the gradient of its input, for which the layer before it is waiting and,
behind all layers, the owners of rows; and the gradient of its weight, for which nobody waits before the dense sum.  In the passes
of a `TrainPipeline` these layers make only the first and keep what the second is made of (`engine/defer_weight_grads.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook

if TYPE_CHECKING:
    from nestpipe.dense.weight_grads import DeferredWeightGrads


class DeferredLinear(nn.Linear):
    """An `nn.Linear` whose weight's gradient a pipeline may make at the end of the batch.

    Until then its input and the gradient of its output must stay as they are.  torch notices where they do not, but not where
    numpy writes into their memory, or something writes through `.data`.
    """

    defer_weight_grads = None

    def forward(self, input: Tensor) -> Tensor:
        late, parameters = self.defer_weight_grads, (self.weight, self.bias)
        if late is None or not _possible(late, input, parameters):
            return super().forward(input)
        result: Tensor = _Layers.apply(late, (False,), input, *parameters)
        return result


class DeferredStack(nn.Sequential):
    """Linear layers, each with an `nn.ReLU` behind it or without, as one node for autograd; late like `DeferredLinear`."""

    defer_weight_grads = None

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        if not self._is_stack():
            kinds = ", ".join(type(layer).__name__ for layer in layers)
            raise TypeError(f"DeferredStack takes nn.Linear, each followed by at most one nn.ReLU, not ({kinds})")

    def forward(self, input: Tensor) -> Tensor:
        late = self.defer_weight_grads
        if late is None or not self._is_stack():
            return super().forward(input)
        relus: list[bool] = []
        parameters: list[nn.Parameter | None] = []
        for module in self._modules.values():
            if isinstance(module, nn.Linear):
                parameters += [module.weight, module.bias]
                relus.append(False)
            else:
                relus[-1] = True
        if not _possible(late, input, parameters):
            return super().forward(input)
        result: Tensor = _Layers.apply(late, relus, input, *parameters)
        return result

    def _is_stack(self) -> bool:
        """Layers may have been added, and somebody may want to be called between them."""
        after_linear = False
        for module in self._modules.values():
            is_linear = type(module) in (nn.Linear, DeferredLinear)
            if not (is_linear or (after_linear and type(module) is nn.ReLU)) or _watched(module):
                return False
            after_linear = is_linear
        return bool(self._modules) and not _has_any_global_hook()


def _watched(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def _possible(late: DeferredWeightGrads, input: Tensor, parameters: Sequence[Tensor | None]) -> bool:
    """Whether this is a pipeline's plain pass in the making, over its own parameters, and nobody looks at their gradients."""
    return (
        late.keeping
        and torch.is_grad_enabled()
        and type(input) in (Tensor, nn.Parameter)
        and input.layout is torch.strided
        and input.dim() > 1
        and input.is_floating_point()
        and all(p is None or late.may_wait(p) for p in parameters)
        and not torch.is_autocast_enabled(input.device.type)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


class _Layers(torch.autograd.Function):
    """Linear layers one after another, each with a ReLU behind it or without: the same operations as torch's own."""

    @staticmethod
    def forward(
        ctx: Any, late: DeferredWeightGrads, relus: Sequence[bool], input: Tensor, *parameters: Tensor | None
    ) -> Tensor:
        # Parameters are not saved by autograd: who looks after saved tensors may give back others in their place.
        ctx.late, ctx.relus, ctx.parameters, ctx.versions = late, relus, parameters, _versions(parameters)
        x = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
        values = []
        for place, relu in enumerate(relus):
            weight, bias = parameters[2 * place : 2 * place + 2]
            assert weight is not None
            x = functional.linear(x, weight, bias)
            if relu:
                x.relu_()
            values.append(x)
        # The result belongs to the caller, who may change it in place, as long as no ReLU made it.
        ctx.save_for_backward(input, *(values if relus[-1] else values[:-1]))
        return x if input.dim() == 2 else torch.ops.aten._unsafe_view(x, [*input.shape[:-1], x.shape[-1]])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, *values = ctx.saved_tensors
        if _versions(ctx.parameters) != ctx.versions:
            raise RuntimeError(
                "a linear layer's weight or bias was changed in place between its forward and backward pass"
            )
        if not ctx.late.taken_up():
            return None, None, *_passed_back(ctx, input, grads[0])
        needed = ctx.needs_input_grad
        inputs = [input.detach().reshape(-1, input.shape[-1]), *values]  # detached: what came before may be freed
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        for place in reversed(range(len(ctx.relus))):
            weight, bias = ctx.parameters[2 * place : 2 * place + 2]
            if ctx.relus[place]:
                mine = place < len(ctx.relus) - 1  # and not the caller's, who may still look at it
                grad = _relu_backward(grad, inputs[place + 1], grad if mine else torch.empty_like(inputs[place + 1]))
            if needed[3 + 2 * place]:
                ctx.late.add(weight, grad, inputs[place])
            if bias is not None and needed[4 + 2 * place]:
                ctx.late.add(bias, grad, None)
            if place or needed[2]:
                grad = ctx.late.passed_back(grad, weight)
        return None, None, (grad.view(input.shape) if needed[2] else None), *(None for _ in ctx.parameters)


def _relu_backward(grad: Tensor, value: Tensor, into: Tensor) -> Tensor:
    result: Tensor = torch.ops.aten.threshold_backward.grad_input(grad, value, 0, grad_input=into)
    return result


def _versions(parameters: Sequence[Tensor | None]) -> list[int]:
    return [0 if p is None else p._version for p in parameters]


def _passed_back(ctx: Any, input: Tensor, grad: Tensor) -> list[Tensor | None]:
    """What plain layers pass back, in a pass that is not the pipeline's own (`torch.autograd.grad` inside a model)."""
    again = torch.is_grad_enabled()  # somebody wants the gradient of this gradient
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
