"""Activations, norms, gates and dropout: kernels beside references and the oracle."""

from __future__ import annotations

from collections.abc import Callable

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from comparing import FLOATS, check_close, with_gradients
from nestpipe.ops import gating
from nestpipe.ops.dropout import dropout
from nestpipe.ops.register_math import exp, log, sigmoid

SEEDS = st.integers(0, 2**31 - 1)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 7), st.lists(st.integers(1, 19), min_size=1, max_size=4), FLOATS, SEEDS)
def test_split_silu(tokens: int, widths: list[int], dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    mixed = torch.randn(tokens, sum(widths), dtype=dtype, requires_grad=True)
    grad = torch.randn(tokens, sum(widths), dtype=dtype)
    ways = gating.split_silu, oracle.plain_split_silu
    check_close(*(with_gradients(torch.cat(way(mixed, widths), 1), [mixed], grad) for way in ways))


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 7), st.integers(1, 19), st.booleans(), st.sampled_from(["layer", "rms"]), FLOATS, SEEDS)
def test_gated_norm(tokens: int, width: int, gated: bool, norm: gating.Norm, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x, gate, grad = (torch.randn(tokens, width, dtype=dtype) for _ in range(3))
    given_ = [x.requires_grad_(), gate.requires_grad_()][: 1 + gated]
    ways = gating.gated_norm, gating.gated_norm_reference, oracle.plain_gated_norm
    found = [with_gradients(way(x, gate if gated else None, norm), given_, grad) for way in ways]
    check_close(*found, looser=100)  # a norm multiplies rounding where a token hardly varies


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 7), st.integers(1, 19), FLOATS, SEEDS)
def test_silu_product(tokens: int, width: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    mixed = torch.randn(tokens, 2 * width, dtype=dtype, requires_grad=True)
    grad = torch.randn(tokens, width, dtype=dtype)
    ways = gating.silu_product, oracle.plain_silu_product
    check_close(*(with_gradients(way(mixed), [mixed], grad) for way in ways))


@pytest.mark.parametrize("share", [0.1, 0.5, 0.93])
def test_dropout(share: float) -> None:
    """Promise: about the right share is zeroed, anew in each call; the others are scaled up; the same places take gradients."""
    torch.manual_seed(3)
    x = torch.ones(1500, 701, requires_grad=True)  # more than one block of the kernel
    first, second = dropout(x, share, True), dropout(x, share, True)
    (grad,) = torch.autograd.grad(first, x, torch.ones_like(first))
    assert torch.equal(grad, first.detach())
    assert set(first.unique().tolist()) == {0.0, torch.tensor(1 / (1 - share)).item()}
    zero, again = (found.detach() == 0 for found in (first, second))
    assert abs(zero.float().mean().item() - share) < 0.003
    for both in (zero & again, zero[:, 1:] & zero[:, :-1], zero[1:] & zero[:-1]):
        assert abs(both.float().mean().item() - share**2) < 0.003
    torch.manual_seed(3)
    assert torch.equal(dropout(x, share, True), first)
    assert dropout(x, share, False) is x and dropout(x, 0.0, True) is x


def test_functions_in_registers() -> None:
    """Promise: exp, log and sigmoid are good to 2 units in the last place everywhere, and silu of a NaN is one."""
    x = np.concatenate([np.linspace(-87, 87, 100_001), [0, -0.0, 1e30, -1e30, np.inf, -np.inf, 1e-30, np.nan]])
    positive = np.concatenate([np.logspace(-37, 38, 100_001), np.linspace(0.5, 2, 10_001), [1.0]])
    exact: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sigmoid": torch.sigmoid, "exp": torch.exp, "log": torch.log
    }  # fmt: skip
    for dtype, close in ((np.float32, 3e-7), (np.float64, 1e-15)):
        for name, kernel in (("sigmoid", _sigmoids), ("exp", _exps), ("log", _logs)):
            given_ = (positive if name == "log" else x if name == "sigmoid" else x[:100_001]).astype(dtype)
            found, wanted = kernel(given_), exact[name](torch.from_numpy(given_).double()).numpy()
            ends = slice(None, -1) if name == "sigmoid" else slice(None)
            away = np.abs(found - wanted)[ends] - close * np.abs(wanted[ends])
            least = 1e-38 if dtype is np.float32 else 0.0
            assert (away <= least + (1e-7 if name == "log" else 0) * 1e-1).all(), (name, given_[ends][np.argmax(away)])
    assert np.isnan(np.float32(np.nan) * _sigmoids(np.array([np.nan], np.float32))[0])


@numba.njit(fastmath={"contract"}, error_model="numpy")
def _sigmoids(x):  # type: ignore[no-untyped-def]
    out = np.empty_like(x)
    for i in range(x.shape[0]):
        out[i] = sigmoid(x[i])
    return out


@numba.njit(fastmath={"contract"}, error_model="numpy")
def _exps(x):  # type: ignore[no-untyped-def]
    out = np.empty_like(x)
    for i in range(x.shape[0]):
        out[i] = exp(x[i])
    return out


@numba.njit(fastmath={"contract"}, error_model="numpy")
def _logs(x):  # type: ignore[no-untyped-def]
    out = np.empty_like(x)
    for i in range(x.shape[0]):
        out[i] = log(x[i])
    return out
