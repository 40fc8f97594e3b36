"""Weight gradients put off to the end of a batch: the same gradients as torch's own, in every kind of pass a model may run."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

from nestpipe import DeferredLinear, DeferredStack
from nestpipe.comm.exchange import Exchange
from nestpipe.comm.world import World
from nestpipe.dense.replica import DenseReplica
from nestpipe.dense.weight_grads import DeferredWeightGrads
from nestpipe.ops import host_products


def stack(*sizes: int, bias: bool = True, last_relu: bool = False) -> DeferredStack:
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(sizes):
        layers += [nn.Linear(n_in, n_out, bias), nn.ReLU()]
    return DeferredStack(*(layers if last_relu else layers[:-1]))


class Trial:
    """A model that puts weights off, beside a copy of it that does not."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.double()
        self.plain = copy.deepcopy(model)
        self.late = DeferredWeightGrads(self.model)
        self.dense = DenseReplica(self.model.named_parameters(), Exchange(World.single(), "dense"))
        self.dense.clear()
        self.made: list[int] = []

    def passes(
        self, *inputs: Tensor, through: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x)
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Gradients of the inputs, each a micro-batch's, by both, with a loss of what came `through`."""
        return self._passes(self.model, inputs, through), self._passes(self.plain, inputs, through)

    def _passes(
        self, model: nn.Module, inputs: tuple[Tensor, ...], through: Callable[[nn.Module, Tensor], Tensor]
    ) -> list[Tensor | None]:
        grads: list[Tensor | None] = []
        for given_input in inputs:
            x = given_input.detach().double().requires_grad_(given_input.requires_grad)
            with self.late.keep():
                loss = through(model, x).square().sum()
                loss.register_hook(self.late.begin)
                loss.backward()
            grads.append(x.grad)
        return grads

    def make(self) -> None:
        self.late.make(self.dense.buckets, self.made.append)

    def waiting(self) -> int:
        return sum(map(len, self.late._kept.values()))

    def check(self) -> None:
        """After `make`: every parameter's gradient is the plain one's."""
        assert self.made == list(range(len(self.dense.buckets))) and not self.waiting()
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
    assert trial.waiting() == (len(sizes) - 1) * (2 if bias else 1) * len(samples)
    assert not any(p.grad.any() for p in trial.model.parameters() if p.grad is not None)
    trial.make()
    trial.check()


@pytest.mark.parametrize("more", [(), (2,)])
def test_large_layers_of_uneven_width(more: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: columns of zeros, which make products faster, change no gradient; nor does a weight of an earlier micro-batch."""
    monkeypatch.setattr(host_products, "LARGE", 50)
    monkeypatch.setattr(host_products, "MANY", 1)
    trial = Trial(stack(21, 19, 35, 2))
    for n in (3, 0, 4):
        (mine,), (theirs,) = trial.passes(torch.randn(n, *more, 21).requires_grad_())
        assert mine is not None and theirs is not None and torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)
        for model in (trial.model, trial.plain):
            with torch.no_grad():
                model[0].weight.mul_(0.5)
    assert len(trial.late._wide) == 3
    trial.make()
    trial.check()


def test_a_bias_of_any_shape() -> None:
    """Promise: what torch takes as a bias is trained, and not left at zero."""
    layer = DeferredLinear(3, 4)
    layer.bias = nn.Parameter(torch.zeros(1, 4))
    trial = Trial(layer)
    trial.passes(torch.randn(5, 3), torch.randn(2, 3))
    trial.make()
    trial.check()
    assert layer.bias.grad is not None and layer.bias.grad.any()


class Odd(nn.Module):
    """Layers alone, one used twice, one frozen, one that somebody normalises, one plain, and a parameter that is no layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = DeferredLinear(3, 3)
        self.frozen = DeferredLinear(3, 3).requires_grad_(False)
        self.mixed = nn.Sequential(DeferredLinear(3, 3), nn.Tanh(), nn.Linear(3, 3))
        self.partly = stack(3, 3, 3)
        self.partly[0].requires_grad_(False)
        self.normed = nn.utils.parametrizations.weight_norm(DeferredLinear(3, 3))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.first(self.first(x))) * self.scale
        return self.normed(self.partly(self.mixed(x))) @ self.first.weight


def test_layers_of_all_kinds() -> None:
    trial = Trial(Odd())
    trial.passes(torch.randn(4, 3), torch.randn(2, 3))
    assert trial.waiting() == 2 * (2 * 2 + 2 + 2)
    trial.make()
    trial.check()


def attacked(model: nn.Module, x: Tensor) -> Tensor:
    """An adversarial example: a pass for the input's sake, which trains nothing."""
    z = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(model(z).square().sum(), z)
    return model(x + 0.1 * grad.sign())  # type: ignore[no-any-return]


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    """A gradient penalty: the gradient of a gradient."""
    z = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(model(z).square().sum(), z, create_graph=True)
    return torch.cat([model(x).flatten(), grad.flatten()])


def weighed(model: nn.Module, x: Tensor) -> Tensor:
    """By the size of a weight's own gradient, as GradNorm does."""
    out = model(x)
    (grad,) = torch.autograd.grad(out.square().sum(), next(iter(model.parameters())), retain_graph=True)
    return out * grad.square().sum()  # type: ignore[no-any-return]


def trained_within(model: nn.Module, x: Tensor) -> Tensor:
    model(x.detach()).sum().backward()
    return model(x)  # type: ignore[no-any-return]


def kept_by_others(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        return model(x)  # type: ignore[no-any-return]


def vectorised(model: nn.Module, x: Tensor) -> Tensor:
    return torch.vmap(lambda one: model(one[None]))(x)


def forward_mode(model: nn.Module, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        out = model(forward_ad.make_dual(x, torch.ones_like(x)))
        return sum(forward_ad.unpack_dual(out)[:2])  # type: ignore[return-value]


PASSES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "attacked": attacked,
    "penalised": penalised,
    "weighed": weighed,
    "trained within": trained_within,
    "kept by others": kept_by_others,
    "vectorised": vectorised,
    "forward mode": forward_mode,
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "re-entrant checkpoint": lambda model, x: checkpoint(model, x.requires_grad_(), use_reentrant=True),
    "changed in place": lambda model, x: model(x).add_(1).relu_(),
    "expanded": lambda model, x: model(x[:1].expand(5, -1)),
    "transposed": lambda model, x: model(x.t().contiguous().t()),
    "one sample": lambda model, x: model(x[0]),
    "no graph": lambda model, x: model(x) + torch.no_grad()(model)(x),
}


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("way", PASSES)
def test_passes_of_all_kinds(way: str, dims: int) -> None:
    """Promise: only the pipeline's own pass leaves weights for later; whatever else a model does with layers is torch's."""
    trial = Trial(nn.Sequential(stack(3, 4, 3), DeferredLinear(3, 2)))
    x = torch.randn(4, 3)

    def through(model: nn.Module, x: Tensor) -> Tensor:
        shaped = PASSES[way] if dims == 2 else lambda m, z: PASSES[way](lambda y: m(y[..., None, :])[..., 0, :], z)
        return shaped(model, x)

    if dims == 3 and way in ("weighed", "vectorised"):
        pytest.skip("the same as with 2")
    mine, theirs = trial.passes(x.requires_grad_(), x, through=through)
    for a, b in zip(mine, theirs):
        assert a is not None and b is not None and torch.allclose(a, b, rtol=1e-12, atol=1e-12)
    trial.make()
    trial.check()


@contextmanager
def hooked(place: str, layer: nn.Linear, note: Callable[..., None]) -> Iterator[None]:
    if place == "tensor":
        layer.weight.register_hook(note)
    elif place == "after":
        layer.bias.register_post_accumulate_grad_hook(note)
    elif place == "forward":
        layer.register_forward_hook(note)
    elif place == "backward":
        layer.register_full_backward_hook(note)
    elif place == "patched":
        layer.forward = lambda x: (note(), nn.Linear.forward(layer, x) + 1)[1]  # type: ignore[method-assign]
    else:
        handle = register_module_forward_hook(lambda module, *_: note() if module is layer else None)
        try:
            yield
        finally:
            handle.remove()
        return
    yield


@pytest.mark.parametrize("place", ["tensor", "after", "forward", "backward", "patched", "everywhere"])
def test_who_looks_is_shown(place: str) -> None:
    """Promise: hooks on a layer, on its parameters or on all modules, and a layer's own `forward`, are called as by torch."""
    trial, seen = Trial(stack(3, 4, 2)), []
    layers = [model[0] for model in (trial.model, trial.plain)]
    with hooked(place, layers[0], lambda *_: seen.append(1)), hooked(place, layers[1], lambda *_: seen.append(1)):
        trial.passes(torch.randn(4, 3).requires_grad_())
    assert len(seen) == 2
    trial.make()
    trial.check()


def test_a_layer_elsewhere_is_a_plain_one() -> None:
    """Outside of a pipeline's passes, in copies, in evaluation and under autocast nothing is put off."""
    trial = Trial(stack(3, 4, 2))
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
    assert not trial.waiting()


def test_a_stack_that_somebody_added_to_is_a_plain_one() -> None:
    trial = Trial(stack(3, 4, 2))
    for model in (trial.model, trial.plain):
        model.append(nn.Sigmoid())
    trial.passes(torch.randn(4, 3))
    assert not trial.waiting()
    trial.make()
    trial.check()


@pytest.mark.parametrize(
    "layers", [[], [nn.ReLU()], [nn.Linear(2, 2), nn.Tanh()], [nn.Linear(2, 2), nn.ReLU(), nn.ReLU()]]
)
def test_what_is_no_stack_is_refused(layers: list[nn.Module]) -> None:
    with pytest.raises(TypeError, match=r"DeferredStack takes nn.Linear, each followed by at most one nn.ReLU"):
        DeferredStack(*layers)


def test_what_was_kept_must_not_change() -> None:
    """A buffer that is used again for the next micro-batch would silently poison the gradient of the last."""
    trial = Trial(stack(3, 2, 2))
    x = torch.randn(2, 3).double()
    trial._passes(trial.model, (x,), lambda model, _: model(x))
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"changed in place .*: set pipeline\.defer_weight_grads = false"):
        trial.make()


def test_weights_must_not_change_between_the_two_passes() -> None:
    """As torch refuses it: the gradient of the input would be another weight's."""

    def shrunk(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        with torch.no_grad():
            next(iter(model.parameters())).mul_(0.5)
        return out  # type: ignore[no-any-return]

    trial = Trial(stack(3, 2, 2))
    with pytest.raises(RuntimeError, match="changed in place between its forward and backward pass"):
        trial._passes(trial.model, (torch.randn(2, 3),), shrunk)


def test_a_parameter_that_was_frozen_when_the_pipeline_was_made() -> None:
    """Its gradient would be lost without a word."""
    model = stack(3, 4, 2)
    model[0].requires_grad_(False)
    trial = Trial(model)
    model[0].requires_grad_(True)
    trial._passes(trial.model, (torch.randn(4, 3),), lambda model, x: model(x))
    with pytest.raises(RuntimeError, match="make a new TrainPipeline"):
        trial.make()
