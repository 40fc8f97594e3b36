"""Triton's optimizer steps beside numba's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from comparing import FLOATS
from interpreting import Surrounded, same_bits, same_bits_in_any_order
from nestpipe.ops import row_steps_kernels as kernels

steps = pytest.importorskip("nestpipe.ops.row_steps_triton", reason="Triton is not installed")

SEEDS = st.integers(0, 2**31 - 1)
DIMS = st.one_of(st.integers(1, 40), st.sampled_from([64, 130]))
SETTINGS = {
    "sgd": (0.013,),
    "rowwise_adagrad": (0.013, 1e-8, 0.3),
    "adagrad": (0.013, 1e-10),
    "adam": (3e-4, 0.1, 0.001, 1e-8),
}
WIDTHS: dict[str, Callable[[int], int]] = {
    "sgd": lambda dim: 0,
    "rowwise_adagrad": lambda dim: 1,
    "adagrad": lambda dim: dim,
    "adam": lambda dim: 2 * dim,
}
EXTRA = 2
"""State columns behind the optimizer's."""


def rows(name: str, count: int, dim: int, dtype: torch.dtype, grads: Tensor) -> list[Tensor]:
    """Values, state and gradients."""
    state = torch.rand(count, WIDTHS[name](dim) + EXTRA, dtype=dtype) * (torch.rand(count, 1) < 0.7)
    return [torch.randn(count, dim, dtype=dtype), state, grads.to(dtype)]


def step(module: Any, name: str, tensors: list[Any], settings: Any) -> None:
    values, state, grads = tensors
    getattr(module, name)(*([values, grads] if name == "sgd" else [values, state, grads]), *settings)


def by_numba(name: str, tensors: list[Tensor]) -> list[Tensor]:
    found = [tensor.clone() for tensor in tensors]
    arrays = [tensor.numpy() for tensor in found]
    step(kernels, name, arrays, [np.array(SETTINGS[name], arrays[0].dtype)])
    return found


def check(name: str, tensors: list[Tensor], alike: Callable[[Tensor, Tensor], bool]) -> None:
    wanted = by_numba(name, tensors)
    placed = [Surrounded(tensor) for tensor in tensors]
    step(steps, name, [one.tensor for one in placed], SETTINGS[name])
    assert all(alike(one.tensor, tensor) for one, tensor in zip(placed, wanted)) and all(p.intact() for p in placed)


@settings(max_examples=40)
@given(st.sampled_from(sorted(SETTINGS)), st.integers(0, 20), DIMS, FLOATS, SEEDS)
@example("sgd", 0, 3, torch.float32, 0)
@example("adagrad", 1, 1, torch.float64, 0)
@example("adam", 11, 130, torch.float32, 0)
@example("rowwise_adagrad", 9, 130, torch.float32, 0)
@example("rowwise_adagrad", 20, 31, torch.float64, 0)
@example("rowwise_adagrad", 20, 64, torch.float32, 0)
def test_steps(name: str, count: int, dim: int, dtype: torch.dtype, seed: int) -> None:
    """Promise: numba's bits in values and state; state columns behind the optimizer's untouched, as is all else."""
    torch.manual_seed(seed)
    grads = torch.randn(count, dim) * 10.0 ** torch.randint(-6, 3, (count, dim)) * (torch.rand(count, dim) < 0.8)
    check(name, rows(name, count, dim, dtype, grads), same_bits)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", SETTINGS)
def test_not_finite(name: str) -> None:
    """Promise: NaN and infinity go where they go on the host."""
    grads = torch.tensor([[1.0, float("inf")], [float("nan"), 1.0], [0.0, -0.0], [1e30, 1e-30]])
    check(name, [torch.ones(4, 2), torch.zeros(4, 6), grads], same_bits)


@pytest.mark.parametrize("name", SETTINGS)
def test_programs_in_any_order(name: str) -> None:
    """Promise: bits do not depend on which program runs first."""
    torch.manual_seed(0)
    tensors = rows(name, 40, 150, torch.float32, torch.randn(40, 150))

    def run() -> list[Tensor]:
        found = [tensor.clone() for tensor in tensors]
        step(steps, name, found, SETTINGS[name])
        return found

    same_bits_in_any_order(run)
