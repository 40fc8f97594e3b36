"""Pooling and gathering of rows: the kernels beside the reference and beside a loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from comparing import FLOATS, check_close
from nestpipe.ops.pooling import Bags, GatherRows, PoolRows, pool_backward_reference, pool_reference

ROWS, DIM = 5, 3
MEANS, COLUMNS = np.array([True, False]), np.array([4, 0])
"""Of two lookups, whose outputs leave column 3 to others."""
USED = [0, 1, 2, 4, 5, 6]


def by_loop(bags: Bags, weights: Tensor | None, samples: int) -> Tensor:
    """The definition of pooling, differentiable."""
    out, at = torch.zeros(samples, 7, dtype=bags.rows.dtype), 0
    for bag, length in enumerate(bags.lengths.tolist()):
        lookup, sample = divmod(bag, samples)
        total = torch.zeros(DIM, dtype=out.dtype)
        for i in range(at, at + length):
            total = total + bags.rows[int(bags.index[i])] * (1 if weights is None else weights[i])
        place = torch.arange(COLUMNS[lookup], COLUMNS[lookup] + DIM)
        divisor = max(1, length) if MEANS[lookup] else 1
        out = out.index_put((torch.tensor(sample), place), total / divisor)
        at += length
    return out


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=5),
    st.booleans(),
    FLOATS,
    st.integers(0, 2**31 - 1),
)
@example([], True, torch.float32, 0)
@example([(3, 0)], True, torch.float32, 0)
def test_pooling(lengths: list[tuple[int, int]], weighted: bool, dtype: torch.dtype, seed: int) -> None:
    """Promise: kernels, reference and loop give the same sums and means, and the same gradients of rows and weights."""
    torch.manual_seed(seed)
    samples, count = len(lengths), sum(map(sum, lengths))
    sizes = torch.tensor([a for a, _ in lengths] + [b for _, b in lengths], dtype=torch.int64)
    index = np.random.default_rng(seed).integers(0, ROWS, count).astype(np.int32)
    rows, grad = torch.randn(ROWS, DIM, dtype=dtype), torch.randn(samples, 7, dtype=dtype)
    weights = torch.randn(count, dtype=dtype, requires_grad=True) if weighted else None
    given_weights = [] if weights is None else [weights]

    def bags(places: Any) -> Bags:
        return Bags(rows, torch.zeros_like(rows), places, sizes, MEANS, COLUMNS)

    ours, theirs, oracles = bags(index), bags(torch.from_numpy(index)), bags(index)
    anchor = torch.zeros(0, requires_grad=True)
    pooled = PoolRows.apply(anchor, [weights], [ours], (samples, 7), *given_weights)
    mine = [pooled[:, USED], *torch.autograd.grad(pooled, given_weights or anchor, grad, allow_unused=True)]
    assert ours.grads is not None and theirs.grads is not None
    reference = torch.zeros(samples, 7, dtype=dtype)
    pool_reference(theirs, weights, reference)
    passed = pool_backward_reference(theirs, weights, grad)
    rows.requires_grad_()
    wanted = by_loop(oracles, weights, samples)
    by_rows, *by_weights = (
        torch.zeros_like(tensor) if found is None else found
        for tensor, found in zip(
            [rows, *given_weights],
            torch.autograd.grad(wanted, [rows, *given_weights], grad, allow_unused=True)
            if wanted.requires_grad
            else [None, None],
        )
    )
    check_close(
        [mine[0], ours.grads, *(mine[1:] if weighted else [])],
        [reference[:, USED], theirs.grads, *([passed] if passed is not None else [])],
        [wanted[:, USED], by_rows, *by_weights],
    )


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 20), FLOATS, st.integers(0, 2**31 - 1))
@example(0, torch.float32, 0)
@example(1, torch.float64, 0)
def test_gathering(count: int, dtype: torch.dtype, seed: int) -> None:
    """Promise: the row of every id, and gradients added to the rows' own in the order of ids."""
    torch.manual_seed(seed)
    rows, grads = torch.randn(ROWS, DIM, dtype=dtype), torch.randn(ROWS, DIM, dtype=dtype)
    index, passed = torch.randint(0, ROWS, (count,)), torch.randn(count, DIM, dtype=dtype)
    wanted = [rows[index], grads.index_add(0, index, passed)]
    found = GatherRows.apply(torch.zeros(0, requires_grad=True), rows, grads, index.numpy())
    found.backward(passed)
    check_close([found, grads], wanted)
