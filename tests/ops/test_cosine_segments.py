"""Cosines in segments: the same as in one piece, with bounded memory and a fixed order of sums on a device."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from comparing import FLOATS, check_close, with_gradients
from nestpipe.ops import cosine_segments
from nestpipe.ops.cosine_segments import SegmentedCosines
from nestpipe.ops.sampled_softmax import indexed_cosines, indexed_cosines_reference
from simulated import in_order


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 7), st.integers(1, 4), st.integers(2, 9), st.integers(1, 500), st.booleans(), FLOATS,
       st.integers(0, 2**31 - 1))  # fmt: skip
@example(0, 2, 4, 1, False, torch.float64, 0)
@example(7, 3, 5, 130, True, torch.float64, 0)
def test_segments_and_reference(
    queries: int, each: int, dim: int, size: int, tiny: bool, dtype: torch.dtype, seed: int
) -> None:
    """Promise: cosines and gradients are those of the reference, however small the segments."""
    torch.manual_seed(seed)
    q, rows = torch.randn(queries, dim, dtype=dtype), torch.randn(4, dim, dtype=dtype)
    if tiny:
        q[::2] *= 1e-9
        rows[0] = 0
    q.requires_grad_(), rows.requires_grad_()
    index = torch.randint(0, 4, (queries, each), dtype=torch.int32)
    grad = torch.randn(queries, each, dtype=dtype)
    with mock.patch.object(cosine_segments, "SEGMENT_BYTES", size):
        found = with_gradients(SegmentedCosines.apply(q, rows, index), [q, rows], grad)
    check_close(found, with_gradients(indexed_cosines_reference(q, rows, index), [q, rows], grad))


class Largest(torch.overrides.TorchFunctionMode):
    """Notes the largest tensor that an operation makes."""

    numbers = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = function(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numbers = max(self.numbers, out.numel())
        return out


def test_nothing_is_larger_than_a_segment() -> None:
    """Promise: no tensor [positions, negatives, D]."""
    queries, rows = torch.randn(64, 16, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    index = torch.randint(0, 8, (64, 10))
    with mock.patch.object(cosine_segments, "SEGMENT_BYTES", 4 * 16 * 10 * 5), Largest() as largest:
        SegmentedCosines.apply(queries, rows, index).sum().backward()
    assert 0 < largest.numbers <= max(64 * 16, 5 * 10 * 16)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_a_devices_atomics_changes_no_bit(seed: int) -> None:
    """Promise: the same bits in whatever order a device adds."""
    torch.manual_seed(0)
    made = torch.randn(40, 8), torch.randn(5, 8), torch.randint(0, 5, (40, 6)), torch.randn(40, 6)

    def on_the_device() -> list[Tensor]:
        queries, rows, index, grad = (t.to("sim") for t in made)
        queries.requires_grad_(), rows.requires_grad_()
        with mock.patch.object(cosine_segments, "SEGMENT_BYTES", 2000):
            return [
                t.detach().cpu() for t in with_gradients(indexed_cosines(queries, rows, index), [queries, rows], grad)
            ]

    in_order("late")
    first = on_the_device()
    in_order("random", seed, shuffle_atomics=True)
    assert all(torch.equal(a, b) for a, b in zip(first, on_the_device()))
    in_order("late")
    queries, rows = (t.clone().requires_grad_() for t in made[:2])
    check_close(first, with_gradients(indexed_cosines(queries, rows, made[2]), [queries, rows], made[3]))
