"""The private parts of torch that deferred weight gradients use still say what they are used for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from nestpipe.nn import torch_private


def test_every_backward_pass_has_a_number_of_its_own() -> None:
    """A pass inside another is not the other one, and outside of both there is none."""
    x, seen = torch.ones(2, requires_grad=True), list[int]()

    def nested(grad: torch.Tensor) -> None:
        seen.append(torch_private.backward_pass())
        with torch.enable_grad():
            inside = torch.ones(2, requires_grad=True).sum()
            inside.register_hook(lambda _: seen.append(torch_private.backward_pass()))
            inside.backward()
        seen.append(torch_private.backward_pass())

    assert torch_private.backward_pass() == -1
    total = x.sum()
    total.register_hook(nested)
    total.backward()
    outer, inner, again = seen
    assert outer == again and inner != outer and -1 not in seen and torch_private.backward_pass() == -1


@pytest.mark.slow
def test_transforms_are_noticed() -> None:
    seen = list[bool]()

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_private.is_transformed())
        return x.sum()

    torch.vmap(note)(torch.ones(2, 2))
    torch.func.grad(note)(torch.ones(2))
    torch.func.jvp(note, (torch.ones(2),), (torch.ones(2),))
    assert seen == [True] * 3 and not torch_private.is_transformed()


def _nothing(*_: Any) -> None: ...


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_hooks_of_a_module_are_noticed(register: str) -> None:
    module = nn.Linear(2, 2)
    assert not torch_private.has_hooks(module)
    handle = getattr(module, register)(_nothing)
    assert torch_private.has_hooks(module)
    handle.remove()
    assert not torch_private.has_hooks(module)


def test_a_patched_forward_and_global_hooks_are_noticed() -> None:
    module = nn.Linear(2, 2)
    module.forward = lambda x: x  # type: ignore[method-assign]
    assert torch_private.has_hooks(module)
    assert not torch_private.has_global_hooks()
    handle = register_module_forward_hook(_nothing)
    try:
        assert torch_private.has_global_hooks()
    finally:
        handle.remove()
    assert not torch_private.has_global_hooks()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_parameter_are_noticed(register: str) -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert not torch_private.has_gradient_hooks(parameter)
    handle = getattr(parameter, register)(_nothing)
    assert torch_private.has_gradient_hooks(parameter)
    handle.remove()
    assert not torch_private.has_gradient_hooks(parameter)


def test_reshaped_shares_memory_and_is_no_view() -> None:
    tensor = torch.arange(6.0)
    found = torch_private.reshaped(tensor, [2, 3])
    assert found.shape == (2, 3) and found.data_ptr() == tensor.data_ptr() and found._base is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_relu_backward_is_torchs(dtype: torch.dtype) -> None:
    """In place too, and for zeros, infinities and NaNs: the bits of masked_fill."""
    value = torch.tensor([0.0, -0.0, 1.0, 1e-40, float("inf"), float("nan")], dtype=dtype)
    for grad in (torch.randn(6, dtype=dtype), torch.full((6,), -0.0, dtype=dtype)):
        wanted = grad.masked_fill(value <= 0, 0)
        found = torch_private.relu_backward(grad, value, torch.empty_like(grad))
        assert found.numpy().tobytes() == wanted.numpy().tobytes()
        torch_private.relu_backward(grad, value, grad)
        assert grad.numpy().tobytes() == wanted.numpy().tobytes()
