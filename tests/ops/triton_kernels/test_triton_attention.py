"""Triton's HSTU attention beside the reference, in float64 and in its own type."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from comparing import FLOATS, with_gradients
from histories import some_events
from interpreting import Surrounded, same_bits_in_any_order
from nestpipe.data.jagged import JaggedTensor
from nestpipe.ops.attention import gated_attention_reference
from nestpipe.ops.event_times import THRESHOLDS, TIME_BUCKETS, EventTimes

attention = pytest.importorskip("nestpipe.ops.attention_triton", reason="Triton is not installed")

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    """So that short samples have several blocks: the interpreter takes milliseconds per operation."""
    with mock.patch.multiple(attention, _BLOCK=4, _STEP=2, _CHUNK=4):
        yield


def inputs(
    lengths: list[int], heads: int, width: int, dtype: torch.dtype, seed: int
) -> tuple[list[Tensor], EventTimes, Tensor]:
    """`mixed` and both biases, the times, and the gradient of the result."""
    torch.manual_seed(seed)
    n = max(lengths, default=3)
    sizes = (sum(lengths), 4 * heads * width), (2 * n + 1,), (TIME_BUCKETS + 1,)
    tensors = [torch.randn(size, dtype=dtype, requires_grad=True) for size in sizes]
    return tensors, some_events(lengths, seed % 18, seed % 3 > 0), torch.randn(sum(lengths), heads * width, dtype=dtype)


def errors(found: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """The largest differences, relative to the largest entry or to 1."""
    return [
        ((a.double() - b).abs().max() / b.abs().max().clamp(min=1)).item() if b.numel() else 0.0
        for a, b in zip(found, wanted, strict=True)
    ]


@settings(max_examples=12)
@given(st.lists(st.integers(0, 9), max_size=3), st.integers(1, 2), st.integers(1, 9), FLOATS, st.integers(0, 2**31 - 1))
@example([9, 0, 5], 2, 3, torch.float32, 0)
@example([], 2, 3, torch.float32, 0)
@example([0, 0], 1, 3, torch.float32, 0)
@example([1], 1, 1, torch.float64, 0)
def test_beside_the_reference(lengths: list[int], heads: int, width: int, dtype: torch.dtype, seed: int) -> None:
    """Promise: result and gradients are the reference's to 1e-6 (1e-12 in float64), or where rounding matters more to the
    reference itself, nearly as close to the truth as it is."""
    tensors, events, grad = inputs(lengths, heads, width, dtype, seed)
    given_ = events, heads, 0.1
    found = with_gradients(attention.gated_attention(*tensors, *given_), tensors, grad)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    wanted = with_gradients(gated_attention_reference(*exact, *given_), exact, grad.double())
    reference = with_gradients(gated_attention_reference(*tensors, *given_), tensors, grad)
    close = 1e-6 if dtype == torch.float32 else 1e-12
    for ours, theirs in zip(errors(found, wanted), errors(reference, wanted)):
        assert ours <= close + 4 * theirs
    assert all(a.dtype == b.dtype and a.shape == b.shape for a, b in zip(found, reference))


def test_to_1e_6() -> None:
    """Promise: with heads of a usual size, in blocks as on a device, float32 is the float64 reference to 1e-6."""
    tensors, events, grad = inputs([33, 1, 18], 2, 24, torch.float32, 0)
    given_ = events, 2, 1 / 33
    with mock.patch.multiple(attention, _BLOCK=32, _STEP=16, _CHUNK=16):
        found = with_gradients(attention.gated_attention(*tensors, *given_), tensors, grad)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    wanted = with_gradients(gated_attention_reference(*exact, *given_), exact, grad.double())
    assert max(errors(found, wanted)) <= 1e-6, errors(found, wanted)


def test_surroundings() -> None:
    """Promise: nothing beside the inputs is read into results or written."""
    tensors, events, grad = inputs([6, 3], 1, 5, torch.float32, 4)
    wanted = with_gradients(attention.gated_attention(*tensors, events, 1, 0.1), tensors, grad)
    placed = [Surrounded(t.detach(), columns=False) for t in (*tensors, events.time.values())]
    views = [one.tensor.requires_grad_(one.tensor.is_floating_point()) for one in placed]
    moved = EventTimes(JaggedTensor(views[3].detach(), lengths=events.time.lengths()))
    found = with_gradients(attention.gated_attention(*views[:3], moved, 1, 0.1), views[:3], grad)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted)) and all(one.intact() for one in placed)


def test_programs_in_any_order() -> None:
    """Promise: bits do not depend on which program runs first, those of the biases' gradients included."""
    tensors, events, grad = inputs([9, 0, 6], 2, 3, torch.float32, 0)

    def run() -> list[Tensor]:
        return with_gradients(attention.gated_attention(*tensors, events, 2, 0.1), tensors, grad)

    same_bits_in_any_order(run, seeds=2)


def test_shapes_that_do_not_fit() -> None:
    """Promise: what can be seen without waiting for the device is checked."""
    tensors, events, _ = inputs([3, 2], 1, 2, torch.float32, 0)
    with pytest.raises(ValueError, match="does not fit times of 5"):
        attention.gated_attention(tensors[0][:4], *tensors[1:], events, 1, 0.1)
    with pytest.raises(ValueError, match="3 biases by place"):
        attention.gated_attention(tensors[0], tensors[1][:3], tensors[2], events, 1, 0.1)


def test_buckets_at_the_edges() -> None:
    """Promise: a gap next to a bucket's edge, no gap and the largest are in the bucket that the thresholds say."""
    edges = [int(t) + off for t in THRESHOLDS for off in (-1, 0, 1)] + [0, 2**62, 2**63 - 1]
    times = torch.tensor([[0, gap] for gap in edges] + [[-(2**63), 2**63 - 1], [2**63 - 1, -(2**63)]]).view(-1)
    events = EventTimes(JaggedTensor(times, lengths=torch.full((len(edges) + 2,), 2)))
    mixed, by_time = torch.ones(len(edges) + 2, 4), torch.arange(TIME_BUCKETS + 1.0)
    attended = torch.zeros(len(mixed), 1)
    pairs = attention._Pairs(mixed, torch.zeros(1), by_time, times, events.starts, 1, 1, 1.0)
    attention._attend[pairs.blocks, pairs.samples](*pairs.given, attended, *pairs.meta, **pairs.options)
    silu = torch.nn.functional.silu
    score = silu(torch.ones(())) ** 2 + events.buckets.view(-1).float()
    assert torch.allclose(attended.view(-1), silu(score) * silu(torch.ones(())), rtol=1e-6)
