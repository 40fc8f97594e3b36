"""HSTU's attention: the kernels beside the reference, and both beside the oracle."""

from __future__ import annotations

from unittest import mock

import numba
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import oracle
from comparing import FLOATS, check_close, with_gradients
from nestpipe.ops import attention
from nestpipe.ops.attention_kernels import sigmoid
from nestpipe.ops.relative_bias import TIME_BUCKETS


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 9), max_size=5),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 10),
    FLOATS,
    st.integers(0, 2**31 - 1),
)
@example([9, 1, 4], 2, 3, 4, torch.float64, 0)
@example([], 2, 3, 4, torch.float32, 0)
@example([5], 1, 3, 2, torch.float32, 0)
def test_kernels_reference_and_oracle(
    lengths: list[int], heads: int, width: int, block: int, dtype: torch.dtype, seed: int
) -> None:
    """Promise: kernels in blocks of any size, reference and oracle give the same result and the same gradients."""
    torch.manual_seed(seed)
    n, count = max(lengths, default=3), torch.tensor(lengths, dtype=torch.int64)
    bucket = torch.randint(0, TIME_BUCKETS + 1, (len(lengths), n, n), dtype=torch.int16)
    sizes = (sum(lengths), 4 * heads * width), (17,), (TIME_BUCKETS + 1,)
    inputs = [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]
    grad = torch.randn(sum(lengths), heads * width, dtype=dtype)
    ways = [attention.gated_attention, attention.gated_attention_reference, oracle.plain_gated_attention]
    with mock.patch.object(attention, "_BLOCK", block):
        found = [
            with_gradients(way(*inputs, bucket, count, heads, 0.1), inputs, grad) for way in ways[: 3 if lengths else 2]
        ]
    check_close(*found, looser=100)  # layer norm multiplies rounding where a token hardly varies


@pytest.mark.parametrize(
    ("tokens", "lengths", "places", "biases"),
    [(5, [2, 2], 3, 9), (5, [4, 1], 3, 9), (5, [6, -1], 6, 11), (5, [3, 2], 3, 4), (5, [5], 5, 9)],
)
def test_shapes_that_do_not_fit(tokens: int, lengths: list[int], places: int, biases: int) -> None:
    """Promise: no kernel reads or writes out of bounds."""
    bucket = torch.zeros(2, places, places, dtype=torch.int16)
    by_place, by_time = torch.zeros(biases), torch.zeros(TIME_BUCKETS + 1)
    with pytest.raises(ValueError, match=r"does not fit time buckets|a sample has 0 to"):
        attention.gated_attention(torch.zeros(tokens, 8), by_place, by_time, bucket, torch.tensor(lengths), 1, 0.1)


def test_floats_are_promoted() -> None:
    """Promise: a float64 model on float32 rows computes in float64."""
    bucket, lengths = torch.zeros(1, 2, 2, dtype=torch.int16), torch.tensor([2])
    time = torch.zeros(TIME_BUCKETS + 1, dtype=torch.float64)
    found = attention.gated_attention(torch.randn(2, 8), torch.zeros(3).double(), time, bucket, lengths, 1, 0.1)
    assert found.dtype == torch.float64


def test_other_floats_take_the_reference() -> None:
    """Promise: a dtype without a kernel still works."""
    bucket, lengths = torch.zeros(1, 2, 2, dtype=torch.int16), torch.tensor([2])
    biases = torch.zeros(3), torch.zeros(TIME_BUCKETS + 1)
    mixed = torch.randn(2, 8)
    wanted = attention.gated_attention(mixed, *biases, bucket, lengths, 1, 0.1)
    found = attention.gated_attention(mixed.bfloat16(), *(b.bfloat16() for b in biases), bucket, lengths, 1, 0.1)
    assert found.dtype == torch.bfloat16 and torch.allclose(found.float(), wanted, rtol=0.1, atol=0.1)


def test_evaluation_keeps_no_slopes() -> None:
    """Promise: evaluation skips what only training needs, and gives the same result."""
    bucket, lengths = torch.zeros(1, 5, 5, dtype=torch.int16), torch.tensor([5])
    biases = torch.randn(9, requires_grad=True), torch.randn(TIME_BUCKETS + 1, requires_grad=True)
    mixed = torch.randn(5, 8)
    trained = attention.gated_attention(mixed, *biases, bucket, lengths, 1, 0.1)
    with torch.no_grad(), mock.patch.object(attention.kernels, "weigh", wraps=attention.kernels.weigh) as weigh:
        evaluated = attention.gated_attention(mixed, *biases, bucket, lengths, 1, 0.1)
    assert torch.equal(trained.detach(), evaluated) and weigh.call_args.args[-1].size == 0


def test_sigmoid_in_registers() -> None:
    """Promise: the kernels' sigmoid is good to 2 units in the last place everywhere, and a NaN stays one."""
    x = np.concatenate([np.linspace(-87, 87, 100_001), [0, -0.0, 1e30, -1e30, np.inf, -np.inf, 1e-30, np.nan]])
    for dtype, close in ((np.float32, 3e-7), (np.float64, 1e-15)):
        given_ = x.astype(dtype)
        found = _sigmoids(given_)
        wanted = torch.from_numpy(given_).double().sigmoid().numpy()
        least = 1e-38 if dtype is np.float32 else 0.0
        away = np.abs(found - wanted)[:-1]
        assert (away <= close * wanted[:-1] + least).all(), given_[:-1][np.argmax(away - close * wanted[:-1])]
        assert np.isnan(given_[-1] * found[-1])


@numba.njit(fastmath={"contract"}, error_model="numpy")
def _sigmoids(x):  # type: ignore[no-untyped-def]
    out = np.empty_like(x)
    for i in range(x.shape[0]):
        out[i] = sigmoid(x[i])
    return out
