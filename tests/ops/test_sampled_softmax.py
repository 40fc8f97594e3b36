"""Cosines of queries and indexed rows: the kernel beside the reference, and both beside the oracle."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import oracle
from comparing import FLOATS, check_close, with_gradients
from nestpipe.ops import sampled_softmax
from nestpipe.ops.sampled_softmax import indexed_cosines, indexed_cosines_reference, sampled_softmax_loss


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 5), st.integers(1, 4), st.integers(2, 9), st.booleans(), FLOATS, st.integers(0, 2**31 - 1))
@example(3, 2, 4, True, torch.float64, 0)
@example(0, 2, 4, False, torch.float32, 0)
@example(1, 1, 4, False, torch.float32, 0)
def test_kernel_reference_and_oracle(
    queries: int, each: int, dim: int, tiny: bool, dtype: torch.dtype, seed: int
) -> None:
    """Promise: the same cosines and gradients, also of vectors too short to have a direction; the same bits where rows are
    too many for the cache.  (In one dimension every gradient is 0, and the difference is nothing but rounding.)"""
    torch.manual_seed(seed)
    q, rows = torch.randn(queries, dim, dtype=dtype), torch.randn(4, dim, dtype=dtype)
    if tiny:
        q[::2] *= 1e-9
        rows[0] = 0
    q.requires_grad_(), rows.requires_grad_()
    index = torch.randint(0, 4, (queries, each), dtype=torch.int32)
    grad = torch.randn(queries, each, dtype=dtype)
    ways = indexed_cosines, indexed_cosines_reference, oracle.plain_indexed_cosines
    found, *others = (with_gradients(way(q, rows, index), [q, rows], grad) for way in ways)
    check_close(found, *others)
    with mock.patch.object(sampled_softmax, "IN_CACHE", 0):
        again = with_gradients(indexed_cosines(q, rows, index), [q, rows], grad)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_floats_are_promoted_and_shapes_checked() -> None:
    """Promise: float64 with float32 gives float64; no kernel reads out of bounds."""
    index = torch.zeros(2, 1, dtype=torch.long)
    assert indexed_cosines(torch.randn(2, 3).double(), torch.randn(1, 3), index).dtype == torch.float64
    with pytest.raises(ValueError, match="do not fit"):
        indexed_cosines(torch.randn(2, 3), torch.randn(1, 4), index)


def test_a_negative_that_is_the_target_does_not_count() -> None:
    """Promise: the loss is that of the other negatives alone."""
    torch.manual_seed(0)
    queries, rows, target = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 1, 2])
    negatives = torch.tensor([[3, 4], [4, 3], [3, 3]])
    more = torch.cat([negatives, target[:, None]], dim=1)
    found, wanted = (sampled_softmax_loss(queries, rows, target, some, 0.05) for some in (more, negatives))
    assert torch.allclose(found, wanted)
