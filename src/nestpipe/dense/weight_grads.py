"""Deferred weight gradients: backward passes keep what they are made of, the stage `weight_grad` makes them.

The stage runs while the last row gradients and the next batch's first rows travel.  Each weight's gradient is summed in
place, in the order of the micro-batches, under every schedule.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from nestpipe.dense.replica import Bucket
from nestpipe.nn import torch_private
from nestpipe.nn.deferred import DeferredLinear, DeferredStack
from nestpipe.ops.host_products import add_weight_products, is_worth_widening, widened

Kept = tuple[Tensor, Tensor | None, int, int]
"""Of a layer in a micro-batch: gradient of the output, input (None for a bias), and the versions of both."""


class DeferredWeightGrads:
    """What the deferred layers of one model keep of the micro-batches of one batch."""

    def __init__(self, model: nn.Module) -> None:
        self._kept: dict[nn.Parameter, list[Kept]] = defaultdict(list)
        self._wide: dict[nn.Parameter, tuple[int, Tensor]] = {}
        """Widened weights of this batch, and their versions."""
        self._parameters = set(model.parameters())
        self.keeping = False
        self._pass = -1
        self.layers = [module for module in model.modules() if isinstance(module, DeferredLinear | DeferredStack)]
        for layer in self.layers:
            layer.weight_grads = self

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those of the deferred layers."""
        return [parameter for layer in self.layers for parameter in layer.parameters()]

    @contextlib.contextmanager
    def keep(self) -> Iterator[None]:
        """Around the forward and backward pass of a micro-batch: within it, weight gradients may be deferred."""
        self.keeping, self._pass = True, -1
        try:
            yield
        finally:
            self.keeping = False

    def begin(self, grad: Tensor) -> None:
        """A hook on the loss.  The backward pass that calls it is the pipeline's own."""
        self._pass = torch_private.backward_pass()

    def in_own_pass(self) -> bool:
        """Whether the backward pass that is running is the pipeline's, not one that the model runs by itself."""
        return self.keeping and torch_private.backward_pass() == self._pass

    def may_defer(self, parameter: Tensor) -> bool:
        """Whether the parameter is one of the model's, and no hook wants to see its gradient."""
        return parameter in self._parameters and not torch_private.has_gradient_hooks(parameter)

    def add(self, parameter: nn.Parameter, grad: Tensor, input: Tensor | None) -> None:
        """Keeps the gradient of a layer's output and the layer's input (None for a bias)."""
        self._kept[parameter].append((grad, input, grad._version, 0 if input is None else input._version))

    def input_grad(self, grad: Tensor, weight: nn.Parameter) -> Tensor:
        """grad @ weight."""
        if not is_worth_widening(weight, grad.shape[0]):
            return grad @ weight
        version, wide = self._wide.get(weight, (-1, weight))
        if version != weight._version:
            wide = widened(weight.detach())
            self._wide[weight] = weight._version, wide
        return (grad @ wide)[:, : weight.shape[1]]

    def make(self, buckets: Sequence[Bucket], made: Callable[[int], None]) -> None:
        """Adds what was kept to the parameters' gradients, and calls `made` with each bucket as soon as it is final."""
        for number, bucket in enumerate(buckets):
            for parameter in bucket.parameters:
                if parameter in self._kept:
                    _add_to(parameter, self._kept.pop(parameter))
            made(number)
        self._wide.clear()
        if self._kept:
            raise RuntimeError(
                "a parameter was frozen when the pipeline was made: make a new TrainPipeline to train it"
            )

    def clear(self) -> None:
        """Drops what a failed batch has left."""
        self._kept.clear()
        self._wide.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """None: a copy of the model does not belong to this pipeline."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _add_to(parameter: nn.Parameter, kept: list[Kept]) -> None:
    for grad, input, grad_version, input_version in kept:
        if grad._version != grad_version or (input is not None and input._version != input_version):
            raise RuntimeError(
                "the input or the output gradient of a deferred layer was changed in place after its backward pass: "
                "set pipeline.defer_weight_grads = false, or use nn.Linear"
            )
    assert parameter.grad is not None
    products = []
    for grad, input, *_ in kept:
        if input is None:  # a bias
            parameter.grad.add_(grad.sum(0))
        else:
            products.append((grad, input))
    if products:
        add_weight_products(parameter.grad, products)
