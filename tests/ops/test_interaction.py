"""DLRM's interaction: the kernels beside the reference, and both beside the oracle."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import oracle
from comparing import FLOATS, check_close, with_gradients
from nestpipe.ops.interaction import interact, interact_backward_reference, interact_reference


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 5), st.integers(1, 11), st.integers(1, 70), st.booleans(), FLOATS, st.integers(0, 2**31 - 1))
@example(3, 1, 4, True, torch.float64, 0)
@example(0, 3, 4, True, torch.float32, 0)
@example(1, 26, 64, True, torch.float32, 0)
def test_kernels_reference_and_oracle(
    count: int, vectors: int, dim: int, dense: bool, dtype: torch.dtype, seed: int
) -> None:
    """Promise: the same dots and gradients, whatever the sizes: whole tiles of a vector and what they leave."""
    torch.manual_seed(seed)
    vectors = vectors if dense else vectors + 1  # a single vector has no partner
    others = torch.randn(count, vectors, dim, dtype=dtype, requires_grad=True)
    first = torch.randn(count, dim, dtype=dtype, requires_grad=True) if dense else None
    inputs = [others] if first is None else [first, others]
    wanted = oracle.plain_interact(first, others)
    grad = torch.randn_like(wanted)
    one = others.detach()[:, :0] if first is None else first.detach()[:, None]
    passed = interact_backward_reference(grad, one, others.detach())[0 if dense else 1 :]
    reference = [interact_reference(one, others.detach()), *(p.view_as(i) for p, i in zip(passed, inputs))]
    ours, theirs = (with_gradients(out, inputs, grad) for out in (interact(first, others), wanted))
    check_close(ours, reference, theirs, looser=10)


def test_shapes_are_checked_and_floats_promoted() -> None:
    """Promise: no kernel reads out of bounds; double with float gives double, as anywhere in torch."""
    for wrong in [(5, 4), (1, 4), (2, 6)]:
        with pytest.raises(ValueError, match="do not interact"):
            interact(torch.ones(wrong), torch.ones(2, 3, 4))
    found = interact(torch.ones(2, 4, dtype=torch.float64), torch.ones(2, 3, 4))
    assert found.dtype == torch.float64 and found[0, 4:].tolist() == [4.0] * 6


def test_other_floats_take_the_reference() -> None:
    """Promise: a dtype without a kernel still works, backward too."""
    others = torch.randn(2, 3, 4).bfloat16().requires_grad_()
    found = interact(None, others)
    found.sum().backward()
    assert found.dtype == torch.bfloat16 and others.grad is not None and others.grad.shape == others.shape


@pytest.mark.parametrize("dim", [64, 50])
def test_a_sample_has_the_same_dots_in_every_micro_batch(dim: int) -> None:
    """Promise: a sample's dots and gradients do not depend on the samples beside it, to the bit."""
    first, others = torch.randn(12, dim, requires_grad=True), torch.randn(12, 26, dim, requires_grad=True)
    whole = interact(first, others)
    grad = torch.randn_like(whole)
    parts = [interact(f, o) for f, o in zip(first.split(5), others.split(5))]
    assert torch.equal(whole, torch.cat(parts))
    found = torch.autograd.grad(parts, [first, others], grad.split(5))
    assert all(map(torch.equal, found, torch.autograd.grad(whole, [first, others], grad)))
