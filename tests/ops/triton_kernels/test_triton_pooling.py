"""Triton's pooling beside numba's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from comparing import FLOATS
from interpreting import Surrounded, same_bits, same_bits_in_any_order
from nestpipe.ops import pooling_kernels

pooling = pytest.importorskip("nestpipe.ops.pooling_triton", reason="Triton is not installed")

ROWS = 5
BAGS = st.lists(st.tuples(st.integers(0, 10), st.integers(0, 3)), max_size=4)
"""For each sample the ids of two lookups."""
SEEDS = st.integers(0, 2**31 - 1)
DIMS = st.sampled_from([1, 3, 8, 20, 130])


@dataclass
class Case:
    """Two lookups, whose outputs leave a column between them to others."""

    rows: Tensor
    index: Tensor
    lengths: Tensor
    weights: Tensor | None
    means: Tensor | None
    samples: int

    @property
    def columns(self) -> Tensor:
        return torch.tensor([self.rows.shape[1] + 1, 0])

    @property
    def width(self) -> int:
        return 2 * self.rows.shape[1] + 1

    @property
    def starts(self) -> Tensor:
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))

    def for_numba(self) -> tuple[np.ndarray, ...]:
        dtype = np.float32 if self.rows.dtype == torch.float32 else np.float64
        weights = np.empty(0, dtype) if self.weights is None else self.weights.numpy()
        means = np.zeros(2, bool) if self.means is None else self.means.numpy()
        return self.index.numpy(), self.lengths.numpy(), weights, means, self.columns.numpy()


def case(bags: list[tuple[int, int]], dim: int, weighted: bool, averaged: bool, dtype: torch.dtype) -> Case:
    lengths = torch.tensor([a for a, _ in bags] + [b for _, b in bags], dtype=torch.int64)
    count = int(lengths.sum())
    rows = torch.where(
        torch.rand(ROWS, dim) < 0.1, torch.tensor(-0.0, dtype=dtype), torch.randn(ROWS, dim, dtype=dtype)
    )
    return Case(
        rows,
        torch.randint(0, ROWS, (count,), dtype=torch.int32),
        lengths,
        torch.randn(count, dtype=dtype) if weighted else None,
        torch.tensor([True, False]) if averaged else None,
        len(bags),
    )


@settings(max_examples=25)
@given(BAGS, DIMS, st.booleans(), st.booleans(), FLOATS, SEEDS)
@example([], 3, True, True, torch.float32, 0)
@example([(10, 0)], 3, False, False, torch.float32, 0)
@example([(1, 3), (9, 1)], 3, True, True, torch.float32, 0)
def test_forward(
    bags: list[tuple[int, int]], dim: int, weighted: bool, averaged: bool, dtype: torch.dtype, seed: int
) -> None:
    """Promise: numba's bits in the lookups' columns, and no other column touched."""
    torch.manual_seed(seed)
    c = case(bags, dim, weighted, averaged, dtype)
    rows, out = Surrounded(c.rows), Surrounded(torch.randn(c.samples, c.width, dtype=dtype))
    wanted = out.tensor.clone()
    index, lengths, *others = c.for_numba()
    pooling_kernels.pool(c.rows.numpy(), index, lengths, *others, wanted.view(-1).numpy(), c.width)
    lists = [Surrounded(t).tensor for t in (c.index, c.starts)]
    pooling.pool(rows.tensor, *lists, c.weights, c.means, c.columns, out.tensor)
    assert same_bits(out.tensor, wanted) and out.intact()


@settings(max_examples=25)
@given(BAGS, DIMS, st.booleans(), st.booleans(), FLOATS, SEEDS)
@example([], 3, True, True, torch.float32, 0)
@example([(10, 3), (9, 3), (7, 2)], 3, True, True, torch.float32, 0)
@example([(10, 3), (9, 3), (7, 2)], 3, False, True, torch.float32, 1)
def test_backward(
    bags: list[tuple[int, int]], dim: int, weighted: bool, averaged: bool, dtype: torch.dtype, seed: int
) -> None:
    """Promise: numba's bits in the gradients of rows, added in its order to what is there; those of weights up to rounding."""
    torch.manual_seed(seed)
    c = case(bags, dim, weighted, averaged, dtype)
    passed = Surrounded(torch.randn(c.samples, c.width, dtype=dtype))
    grads = Surrounded(torch.randn(ROWS, dim, dtype=dtype))
    wanted, one = grads.tensor.clone(), np.ones(1, c.rows.numpy().dtype)
    index, lengths, weights, means, columns = c.for_numba()
    flat = passed.tensor.clone().view(-1).numpy()
    pooling_kernels.pool_backward(flat, c.width, index, lengths, weights, means, columns, wanted.numpy(), one)
    of = pooling.bags_of(c.starts, c.index.numel())
    order, ascending = (Surrounded(t).tensor for t in pooling.backward_order(c.index, of, c.samples))
    pooling.pool_backward(passed.tensor, order, ascending, of, c.starts, c.weights, c.means, c.columns, grads.tensor)
    assert same_bits(grads.tensor, wanted) and grads.intact()

    found, wanted = Surrounded(torch.ones(c.index.numel(), dtype=dtype)), torch.zeros(c.index.numel(), dtype=dtype)
    pooling_kernels.pool_backward_weights(flat, c.width, c.rows.numpy(), index, lengths, means, columns, wanted.numpy())
    pooling.pool_backward_weights(passed.tensor, c.rows, c.index, of, c.starts, c.means, c.columns, found.tensor)
    close = 1e-6 if dtype == torch.float32 else 1e-14
    assert torch.allclose(found.tensor, wanted, rtol=close, atol=close) and found.intact()


def test_lists_of_a_batch() -> None:
    """Promise: the bag of every id; rows ascending, and of one row by sample, by lookup, and as ids lie."""
    starts = torch.tensor([0, 2, 2, 3, 5])  # lookup 0: bags of 2 and 0 ids; lookup 1: of 1 and 2
    bags = pooling.bags_of(starts, 5)
    assert bags.tolist() == [0, 0, 2, 3, 3] and bags.dtype == torch.int32
    order, ascending = pooling.backward_order(torch.tensor([7, 7, 7, 1, 7]), bags, 2)
    assert order.tolist() == [3, 0, 1, 2, 4] and ascending.tolist() == [1, 7, 7, 7, 7]


@pytest.mark.parametrize("weighted", [False, True])
def test_programs_in_any_order(weighted: bool) -> None:
    """Promise: bits do not depend on which program runs first."""
    torch.manual_seed(0)
    c = case([(10, 3), (9, 3), (7, 2)], 130, weighted, weighted, torch.float32)
    grad = torch.randn(c.samples, c.width)
    bags = pooling.bags_of(c.starts, c.index.numel())
    order, ascending = pooling.backward_order(c.index, bags, c.samples)

    def run() -> list[Tensor]:
        out, grads, by_weights = torch.zeros_like(grad), torch.ones_like(c.rows), torch.zeros(c.index.numel())
        pooling.pool(c.rows, c.index, c.starts, c.weights, c.means, c.columns, out)
        pooling.pool_backward(grad, order, ascending, bags, c.starts, c.weights, c.means, c.columns, grads)
        pooling.pool_backward_weights(grad, c.rows, c.index, bags, c.starts, c.means, c.columns, by_weights)
        return [out, grads, by_weights]

    same_bits_in_any_order(run)
