"""Triton's gathers, copies and sums of rows beside numba's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from comparing import FLOATS
from interpreting import Surrounded, same_bits, same_bits_in_any_order
from nestpipe.ops import rows_kernels as kernels

rows_triton = pytest.importorskip("nestpipe.ops.rows_triton", reason="Triton is not installed")

SEEDS = st.integers(0, 2**31 - 1)
DIMS = st.one_of(st.integers(1, 20), st.sampled_from([64, 130]))
INDICES = st.sampled_from([torch.int32, torch.int64])


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    """Of very different sizes, some of them -0.0."""
    scaled = torch.randn(shape, dtype=dtype) * 10.0 ** torch.randint(-3, 4, shape).to(dtype)
    return torch.where(torch.rand(shape) < 0.1, torch.tensor(-0.0, dtype=dtype), scaled)


@settings(max_examples=25)
@given(st.integers(0, 12), DIMS, FLOATS, INDICES, SEEDS)
@example(0, 3, torch.float32, torch.int64, 0)
@example(1, 1, torch.float32, torch.int32, 0)
def test_gather(count: int, dim: int, dtype: torch.dtype, index_dtype: torch.dtype, seed: int) -> None:
    """Promise: numba's bits, rows with a negative index untouched, nothing read or written beside the rows."""
    torch.manual_seed(seed)
    source, out = Surrounded(numbers(6, dim, dtype=dtype)), Surrounded(numbers(count, dim, dtype=dtype))
    index = Surrounded(torch.randint(-1, 6, (count,), dtype=index_dtype))
    wanted = out.tensor.clone()
    kernels.gather(source.tensor.clone().numpy(), index.tensor.numpy(), wanted.numpy())
    rows_triton.gather(source.tensor, index.tensor, out.tensor)
    assert same_bits(out.tensor, wanted) and out.intact() and source.intact() and index.intact()


@settings(max_examples=20)
@given(st.integers(0, 8), DIMS, FLOATS, INDICES, SEEDS)
def test_copy_rows(count: int, dim: int, dtype: torch.dtype, index_dtype: torch.dtype, seed: int) -> None:
    """Promise: numba's bits, all other rows untouched."""
    torch.manual_seed(seed)
    source, target = Surrounded(numbers(6, dim, dtype=dtype)), Surrounded(numbers(9, dim, dtype=dtype))
    of = Surrounded(torch.randint(0, 6, (count,), dtype=index_dtype))
    to = Surrounded(torch.randperm(9)[:count].to(index_dtype))
    wanted = target.tensor.clone()
    kernels.copy_rows(source.tensor.clone().numpy(), of.tensor.numpy(), wanted.numpy(), to.tensor.numpy())
    rows_triton.copy_rows(source.tensor, of.tensor, target.tensor, to.tensor)
    assert same_bits(target.tensor, wanted) and target.intact() and source.intact()


@settings(max_examples=25)
@given(st.integers(0, 30), st.integers(1, 5), DIMS, FLOATS, INDICES, SEEDS)
@example(30, 1, 3, torch.float32, torch.int32, 0)
@example(0, 1, 3, torch.float32, torch.int64, 0)
def test_add_sorted_rows(
    count: int, distinct: int, dim: int, dtype: torch.dtype, index_dtype: torch.dtype, seed: int
) -> None:
    """Promise: the bits of numba's scatter_add, whose order is that of the index before it was sorted."""
    torch.manual_seed(seed)
    source, target = Surrounded(numbers(count, dim, dtype=dtype)), Surrounded(numbers(7, dim, dtype=dtype))
    index = torch.randint(0, distinct, (count,), dtype=index_dtype) + 1
    ascending, order = (Surrounded(t) for t in torch.sort(index, stable=True))
    wanted = target.tensor.clone()
    kernels.scatter_add(source.tensor.clone().numpy(), index.numpy(), wanted.numpy())
    rows_triton.add_sorted_rows(source.tensor, order.tensor, ascending.tensor, target.tensor)
    assert same_bits(target.tensor, wanted) and target.intact()


@settings(max_examples=25)
@given(st.integers(0, 40), DIMS, FLOATS, SEEDS)
@example(0, 3, torch.float32, 0)
@example(1, 1, torch.float64, 0)
def test_sum_of_squares(count: int, dim: int, dtype: torch.dtype, seed: int) -> None:
    """Promise: the sum of squares in float64, up to its rounding."""
    torch.manual_seed(seed)
    grads = Surrounded(numbers(count, dim, dtype=dtype))
    found = rows_triton.sum_of_squares(grads.tensor)
    wanted = math.fsum((grads.tensor.double() ** 2).flatten().tolist())
    assert found.dtype == torch.float64 and found.shape == ()
    assert found.item() == pytest.approx(wanted, rel=1e-14)
    assert found.item() == pytest.approx(kernels.sum_of_squares(grads.tensor.clone().numpy()), rel=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_shows(bad: float) -> None:
    """Promise: a sum of squares is finite if and only if all gradients are, as large as they may be."""
    grads = torch.full((5, 3), torch.finfo(torch.float32).max)
    assert math.isfinite(rows_triton.sum_of_squares(grads).item())
    grads[4, 2] = bad
    assert not math.isfinite(rows_triton.sum_of_squares(grads).item())


def test_programs_in_any_order() -> None:
    """Promise: bits do not depend on which program runs first."""
    torch.manual_seed(0)
    source, start, index = numbers(40, 150, dtype=torch.float32), torch.randn(5, 150), torch.randint(0, 4, (40,))
    ascending, order = torch.sort(index, stable=True)

    def run() -> list[Tensor]:
        added, copied, gathered = start.clone(), start.clone(), torch.empty(40, 150)
        rows_triton.add_sorted_rows(source, order, ascending, added)
        rows_triton.copy_rows(source, order[:5], copied, torch.arange(5))
        rows_triton.gather(start, index, gathered)
        return [added, copied, gathered, rows_triton.sum_of_squares(source)]

    same_bits_in_any_order(run)


def test_the_order_of_a_sum_of_squares() -> None:
    """Promise: it is the same on every device: numbers of a program at equal places first, then neighbours."""
    torch.manual_seed(0)
    grads = numbers(20, 100, dtype=torch.float64)
    tiles = np.zeros((3, 8, 128))
    tiles.reshape(24, 128)[:20, :100] = grads.numpy() ** 2
    parts = np.zeros(1024)
    parts[:3] = [by_neighbours(tile.reshape(1, -1))[0] for tile in tiles]
    assert rows_triton.sum_of_squares(grads).item() == by_neighbours(parts[None])[0]


def by_neighbours(x: np.ndarray) -> np.ndarray:
    """The sums of rows of a power of two numbers."""
    while x.shape[1] > 1:
        x = x[:, 0::2] + x[:, 1::2]
    return x[:, 0]
