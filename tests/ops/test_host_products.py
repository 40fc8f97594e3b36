"""Products of a linear layer's backward pass: widened or turned round, they are torch's own."""

from __future__ import annotations

from unittest import mock

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from comparing import FLOATS, check_close
from nestpipe.ops import host_products
from nestpipe.ops.host_products import add_weight_products, add_weight_products_reference


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 9), max_size=4), st.integers(1, 40), st.integers(1, 40), FLOATS, st.integers(0, 2**31 - 1)
)
@example([], 9, 9, torch.float32, 0)
@example([0], 21, 19, torch.float32, 0)
@example([1], 21, 19, torch.float32, 0)
def test_weight_products(rows: list[int], n_in: int, n_out: int, dtype: torch.dtype, seed: int) -> None:
    """Promise: whatever the shapes, the sum over micro-batches is that of plain products."""
    torch.manual_seed(seed)
    pairs = [(torch.randn(n, n_out, dtype=dtype), torch.randn(n, n_in, dtype=dtype)) for n in rows]
    start = torch.randn(n_out, n_in, dtype=dtype)
    ours, reference = start.clone(), start.clone()
    with mock.patch.multiple(host_products, LARGE=50, MANY=1):
        add_weight_products(ours, pairs)
    add_weight_products_reference(reference, pairs)
    check_close([ours], [reference], [start + sum(grad.T @ input for grad, input in pairs)])
