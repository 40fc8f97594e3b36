"""Weight gradients of late layers: kept by the backward passes of a batch, made by the stage `weights`.

It runs while the last row gradients and the next batch's first rows travel.  Every weight's gradient is summed in place,
micro-batch by micro-batch in their order, under every schedule alike.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nestpipe.dense.replica import Bucket
from nestpipe.nn.deferred import DeferredLinear, DeferredStack
from nestpipe.ops.host_products import add_weight_products, is_worth_widening, widened

Kept = tuple[Tensor, Tensor | None, int, int]
"""Of one layer in one micro-batch: gradient of the output; input (None for a bias); their versions, which must not change."""


class DeferredWeightGrads:
    """What the late layers of one model keep of the micro-batches of one batch."""

    def __init__(self, model: nn.Module) -> None:
        self._kept: dict[nn.Parameter, list[Kept]] = defaultdict(list)
        self._wide: dict[nn.Parameter, tuple[int, Tensor]] = {}
        """Weights of this batch at widths that the host likes, and their versions."""
        self._parameters = set(model.parameters())
        self.keeping = False
        self._pass = -1
        self.layers = [module for module in model.modules() if isinstance(module, DeferredLinear | DeferredStack)]
        for layer in self.layers:
            layer.__dict__["defer_weight_grads"] = self

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of the layers that may wait."""
        return [parameter for layer in self.layers for parameter in layer.parameters()]

    @contextlib.contextmanager
    def keep(self) -> Iterator[None]:
        """Around the forward and backward pass of a micro-batch: within it, weights may wait."""
        self.keeping, self._pass = True, -1
        try:
            yield
        finally:
            self.keeping = False

    def begin(self, grad: Tensor) -> None:
        """A hook on the loss: the backward pass in which it is called is the one whose weights wait."""
        self._pass = torch._C._current_graph_task_id()

    def taken_up(self) -> bool:
        """Whether the backward pass that runs now is that one, and not one that the model runs by itself."""
        return self.keeping and torch._C._current_graph_task_id() == self._pass

    def may_wait(self, parameter: Tensor) -> bool:
        """Whether it is the model's own, and nobody wants to see its gradient on its way."""
        return (
            parameter in self._parameters
            and not parameter._backward_hooks
            and not getattr(parameter, "_post_accumulate_grad_hooks", None)
        )

    def add(self, parameter: nn.Parameter, grad: Tensor, input: Tensor | None) -> None:
        self._kept[parameter].append((grad, input, grad._version, 0 if input is None else input._version))

    def passed_back(self, grad: Tensor, weight: nn.Parameter) -> Tensor:
        """grad @ weight."""
        if not is_worth_widening(weight, grad.shape[0]):
            return grad @ weight
        version, wide = self._wide.get(weight, (-1, weight))
        if version != weight._version:
            wide = widened(weight.detach())
            self._wide[weight] = weight._version, wide
        return (grad @ wide)[:, : weight.shape[1]]

    def make(self, buckets: Sequence[Bucket], made: Callable[[int], None]) -> None:
        """Adds what was kept to the parameters' gradients, bucket by bucket, and says of each when it is final."""
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
        """Drops what a batch that failed has left, and what the one before knew of weights."""
        self._kept.clear()
        self._wide.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model is not this pipeline's."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def _add_to(parameter: nn.Parameter, kept: list[Kept]) -> None:
    for grad, input, grad_version, input_version in kept:
        if grad._version != grad_version or (input is not None and input._version != input_version):
            raise RuntimeError(
                "the input or the gradient of a late layer was changed in place after its backward pass: "
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
