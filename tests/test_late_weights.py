"""Weight gradients put off to the end of a batch: the same gradients as torch's own, and layers that stay what they were."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nestpipe.comm.exchange import Exchange
from nestpipe.comm.world import World
from nestpipe.engine.dense import DenseReplica
from nestpipe.engine.late_weights import LateLinear, LateStack, LateWeights


def stack(*sizes: int, bias: bool = True, last_relu: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(sizes):
        layers += [nn.Linear(n_in, n_out, bias), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


class Trial:
    """A model that puts weights off, beside a plain copy of it."""

    def __init__(self, model: nn.Module) -> None:
        self.plain = copy.deepcopy(model).double()
        self.model = model.double()
        self.late = LateWeights(self.model)
        self.dense = DenseReplica(self.model.parameters(), Exchange(World.single(), "dense"))
        self.dense.clear()
        self.made: list[int] = []

    def passes(self, *inputs: Tensor) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of the inputs, each a micro-batch's, by both."""
        return self._through(self.model, *inputs), self._through(self.plain, *inputs)

    def _through(self, model: nn.Module, *inputs: Tensor) -> list[Tensor | None]:
        grads: list[Tensor | None] = []
        for given_input in inputs:
            x = given_input.detach().double().requires_grad_(given_input.requires_grad)
            with self.late.keep():
                model(x).square().sum().backward()
            grads.append(x.grad)
        return grads

    def make(self) -> None:
        self.late.make(self.dense.buckets, self.made.append)

    def check(self) -> None:
        """After `make`: every parameter's gradient is the plain one's."""
        assert self.made == list(range(len(self.dense.buckets)))
        for mine, wanted in zip(self.model.parameters(), self.plain.parameters()):
            if mine.requires_grad:
                expected = torch.zeros_like(wanted) if wanted.grad is None else wanted.grad
                assert mine.grad is not None and torch.allclose(mine.grad, expected, rtol=1e-12, atol=1e-12)


@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=4),
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(), (2,), (2, 3)]),
)
def test_gradients_are_torchs_own(
    sizes: list[int], samples: list[int], bias: bool, last_relu: bool, wanted: bool, more: tuple[int, ...]
) -> None:
    """Promise: whatever the layers, micro-batches and shapes, empty ones too; inputs at once, weights with `make`."""
    torch.manual_seed(len(sizes))
    trial = Trial(stack(*sizes, bias=bias, last_relu=last_relu))
    inputs = [torch.randn(n, *more, sizes[0]).requires_grad_(wanted) for n in samples]
    mine, theirs = trial.passes(*inputs)
    for a, b in zip(mine, theirs):
        assert (a is None) == (b is None)
        assert a is None or (b is not None and torch.equal(a, b))
    assert all(n == 0 for n in samples) or all(not p.grad.any() for p in trial.model.parameters() if p.grad is not None)
    trial.make()
    trial.check()


class Odd(nn.Module):
    """Layers alone, one used twice, one frozen, one in a stack with something else, and a parameter that is no layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.mixed = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self.partly = stack(3, 3, 3)
        self.partly[0].requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.first(self.first(x))) * self.scale
        return self.partly(self.mixed(x)) @ self.first.weight


def test_layers_of_all_kinds() -> None:
    trial = Trial(Odd())
    trial.passes(torch.randn(4, 3), torch.randn(2, 3))
    trial.make()
    trial.check()
    assert type(trial.model.frozen) is nn.Linear and type(trial.model.mixed) is nn.Sequential
    assert type(trial.model.first) is LateLinear and type(trial.model.partly) is LateStack


@pytest.mark.parametrize("place", ["tensor", "forward", "backward"])
def test_hooks_are_called(place: str) -> None:
    """Promise: who looks at a layer or at its gradients sees them when torch would show them."""
    trial, seen = Trial(stack(3, 4, 2)), []

    def note(*_: object) -> None:
        seen.append(place)

    for model in (trial.model, trial.plain):
        layer = model[0]
        assert isinstance(layer, nn.Linear)
        if place == "tensor":
            layer.weight.register_hook(note)
        elif place == "forward":
            layer.register_forward_hook(note)
        else:
            layer.register_full_backward_hook(note)
    trial.passes(torch.randn(4, 3).requires_grad_())
    assert len(seen) == 2
    trial.make()
    trial.check()


def test_a_layer_elsewhere_is_what_it_was() -> None:
    """Outside of a pipeline's passes, in copies, in evaluation and under autocast nothing is put off; names stay."""
    trial = Trial(stack(3, 4, 2))
    assert list(trial.model.state_dict()) == list(trial.plain.state_dict())
    x = torch.randn(2, 3).double()
    trial.model(x).sum().backward()
    trial.plain(x).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(trial.model.parameters(), trial.plain.parameters()))
    other = copy.deepcopy(trial.model)
    with trial.late.keep(), torch.no_grad():
        assert not trial.model(x).requires_grad
    with trial.late.keep():
        other.zero_grad()
        other(x).sum().backward()
        with torch.autocast("cpu"):
            trial.model.float()(x.float()).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(other.parameters(), trial.plain.parameters()))
    assert not trial.late._kept


def test_what_was_kept_must_not_change() -> None:
    """A buffer that is used again for the next micro-batch would silently spoil the gradient of the last."""
    trial = Trial(stack(3, 2, 2))
    x = torch.randn(2, 3).double()
    with trial.late.keep():
        trial.model(x).square().sum().backward()
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place .*: set pipeline\.late_weights = false"):
        trial.make()


@pytest.mark.parametrize("way", ["checkpoint", "on the host"])
def test_saved_tensors_that_come_back_as_others(way: str) -> None:
    """Promise: under checkpointing, and where somebody else keeps what autograd saves, no gradient is lost."""
    trial = Trial(stack(3, 4, 2))
    x = torch.randn(4, 3).double()

    def through(model: nn.Module) -> Tensor:
        if way == "checkpoint":
            return checkpoint(model, x, use_reentrant=False)  # type: ignore[no-any-return]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
            return model(x)  # type: ignore[no-any-return]

    for model in (trial.model, trial.plain):
        with trial.late.keep():
            through(model).square().sum().backward()
    trial.make()
    trial.check()


def test_a_parameter_that_the_pipeline_does_not_know() -> None:
    """Its gradient would be lost without a word."""
    trial = Trial(stack(3, 4, 2))
    layer = trial.model[0]
    assert isinstance(layer, nn.Linear)
    layer.weight = nn.Parameter(torch.zeros(4, 3).double())
    trial.passes(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match="make a new TrainPipeline"):
        trial.make()
