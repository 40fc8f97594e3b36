"""Where Triton runs, operations take its kernels: here host tensors stand for a device's, and kernels are interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from histories import some_events
from nestpipe.ops import row_steps, rows, triton_support
from nestpipe.ops.attention import gated_attention, gated_attention_reference
from nestpipe.ops.event_times import TIME_BUCKETS
from nestpipe.ops.pooling import Bags, PoolRows

pytest.importorskip("triton", reason="Triton is not installed: pip install 'nestpipe[triton]'")


@pytest.fixture(autouse=True)
def host_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support, "DEVICES", ("cpu",))


@pytest.mark.slow
@pytest.mark.parametrize("means", [[False, False], [True, False]])
def test_pooling_is_the_hosts(means: list[bool]) -> None:
    """Promise: `PoolRows` on a device gives the bits of the numba kernels, forward and backward."""
    torch.manual_seed(0)
    lengths, index = torch.tensor([2, 0, 1, 3]), np.array([0, 2, 2, 1, 2, 0], np.int32)
    values, grad = torch.randn(4, 3), torch.randn(2, 6)
    found = []
    for places in (index, torch.from_numpy(index)):
        bags = Bags(values, torch.zeros(4, 3), places, lengths, np.array(means), np.array([0, 3]))
        pooled = PoolRows.apply(torch.zeros(0, requires_grad=True), [None], [bags], (2, 6))
        pooled.backward(grad)
        found.append((pooled.detach(), bags.grads))
    assert all(torch.equal(here, there) for here, there in zip(*found))


def test_row_operations_are_the_hosts() -> None:
    torch.manual_seed(1)
    source, index = torch.randn(5, 3), torch.tensor([3, 0, 3, 1, 3], dtype=torch.int32)
    here, there = np.zeros((4, 3), np.float32), torch.zeros(4, 3)
    rows.add_rows(source.numpy(), index.numpy(), here)
    rows.add_rows(source, index, there)
    assert np.array_equal(here, there.numpy())
    values, state, grads = (torch.rand(4, 3) for _ in range(3))
    mine = [t.numpy().copy() for t in (values, state, grads)]
    row_steps.adagrad(values, state, grads, 0.1, 1e-8)
    row_steps.adagrad(*mine, 0.1, 1e-8)
    assert np.array_equal(values.numpy(), mine[0]) and np.array_equal(state.numpy(), mine[1])


@pytest.mark.slow
def test_attention_is_the_references() -> None:
    torch.manual_seed(2)
    lengths, heads, width, n = [3, 1], 1, 4, 3
    mixed = torch.randn(4, 4 * heads * width, requires_grad=True)
    by_place, by_time = torch.randn(2 * n - 1), torch.randn(TIME_BUCKETS + 1)
    events = some_events(lengths, 3, True)
    found = gated_attention(mixed, by_place, by_time, events, heads, 0.2)
    wanted = gated_attention_reference(mixed, by_place, by_time, events, heads, 0.2)
    assert torch.allclose(found, wanted, atol=1e-6) and type(found.grad_fn).__name__ == "GatedAttentionBackward"
