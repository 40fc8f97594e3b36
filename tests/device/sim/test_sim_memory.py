"""The allocator of the simulated device, and the race detector."""

from __future__ import annotations

from typing import Any

import torch

from nestpipe.device import sim


def test_memory_goes_back_to_its_stream_at_once(device: Any) -> None:
    """Promise: what Python drops is reused by the same stream at once, by another one never."""
    a, b = device.Stream(), device.Stream()
    with device.stream(a):
        x = torch.zeros(100, device="sim")
        place = x.data_ptr()
        del x
    with device.stream(b):
        other = torch.zeros(100, device="sim")
    with device.stream(a):
        y = torch.ones(100, device="sim")
    assert y.data_ptr() == place != other.data_ptr()
    a.synchronize()
    assert y.inner.sum() == 100


def test_memory_begins_at_a_cache_line(device: Any) -> None:
    """Promise: a library whose products depend on where a matrix begins gives the same bits in every run."""
    made = [torch.zeros(size, device="sim") for size in (1, 3, 17, 1000, 5, 70_000)]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in made)


def test_record_stream_delays_reuse(device: Any) -> None:
    """Promise: memory named to another stream is reused when that stream has passed the point where it was dropped."""
    a, b = device.Stream(), device.Stream()

    def hand_over(record: bool) -> tuple[torch.Tensor, torch.Tensor]:
        with device.stream(a):
            x = torch.zeros(100, device="sim")
        b.wait_stream(a)
        with device.stream(b):
            seen = x + 1
            if record:
                x.record_stream(b)
        del x
        with device.stream(a):
            again = torch.full((100,), 5.0, device="sim")
        return seen, again

    seen, again = hand_over(record=True)
    first = again.data_ptr()
    a.synchronize()
    b.synchronize()
    assert seen.inner.tolist() == [1.0] * 100 and sim.report().races == []
    with device.stream(a):
        spare = torch.empty(100, device="sim")  # b has passed: now it is given out
    assert spare.data_ptr() != first
    sim.configure()
    a, b = device.Stream(), device.Stream()
    seen, _ = hand_over(record=False)
    a.synchronize()
    b.synchronize()
    assert seen.inner.tolist() != [1.0] * 100
    races = sim.report().races
    assert races and "taking memory" in races[0]


def test_views_keep_memory(device: Any) -> None:
    """Promise: memory is free when the last view of it is gone, and bytes are counted until then."""
    before = device.memory_allocated()
    x = torch.zeros(1000, device="sim")
    assert device.memory_allocated() == before + 4096
    view = x[10:20].view(2, 5)
    del x
    assert device.memory_allocated() == before + 4096
    del view
    assert device.memory_allocated() == before
    assert device.max_memory_allocated() >= before + 4096
    device.reset_peak_memory_stats()
    assert device.max_memory_allocated() == before


def test_reused_memory_is_poisoned(device: Any) -> None:
    """Promise: new memory holds NaN and no valid index, whoever had it before."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        torch.zeros(64, dtype=dtype, device="sim")
        x = torch.empty(64, dtype=dtype, device="sim")
        assert x.isnan().all().item()
    for dtype in (torch.int32, torch.int64):
        torch.zeros(64, dtype=dtype, device="sim")
        x = torch.empty(64, dtype=dtype, device="sim")
        assert (x > 2**30).all().item() and (x % 2 == 1).all().item()


def test_races_name_both_places(device: Any) -> None:
    """Promise: two streams that touch the same bytes without order are reported, with operations, streams and lines."""
    a, b = device.Stream(), device.Stream()
    x = torch.zeros(10, 4, device="sim")
    device.synchronize()
    with device.stream(a):
        x[:5].add_(1)
    with device.stream(b):
        x[5:].add_(1)  # other bytes
        x[5:].sum()
        assert sim.report().races == []
        x[4].sum()
    (race,) = sim.report().races
    assert "aten.sum" in race and "aten.add_" in race and race.count("sim/test_sim_memory.py:") == 2
    assert f"stream {a.stream_id}" in race and f"stream {b.stream_id}" in race
    with device.stream(a):
        x.zero_()
    assert len(sim.report().races) == 4  # against both reads and the write of b, one line for each pair of places


def test_columns_of_a_matrix_are_told_apart(device: Any) -> None:
    """Promise: values and optimizer state side by side in one buffer do not race, unless columns overlap."""
    a, b = device.Stream(), device.Stream()
    rows = torch.zeros(10, 6, device="sim")
    device.synchronize()
    with device.stream(a):
        rows[:, :4].add_(1)
    with device.stream(b):
        rows[2:7, 4:].add_(1)
        assert sim.report().races == []
        rows[2:, 3:5].sum()
    assert len(sim.report().races) == 1
    with device.stream(a):
        rows[:, :4].zero_()  # does not stand for the whole buffer
        rows.sum()
    assert len(sim.report().races) == 3


def test_order_through_the_host_counts(device: Any) -> None:
    """Promise: what the host has waited for is over for whatever it issues later; a query that says so counts, too."""
    a, b = device.Stream(), device.Stream()
    for wait in ("synchronize", "query"):
        with device.stream(a):
            x = torch.ones(10, device="sim")
            event = a.record_event()
        if wait == "synchronize":
            event.synchronize()
        else:
            while not event.query():
                pass
        with device.stream(b):
            x.add_(1)
        b.synchronize()
    assert sim.report().races == []


def test_order_is_transitive(device: Any) -> None:
    """Promise: a wait for a stream that has waited for another one orders all three."""
    a, b, c = (device.Stream() for _ in range(3))
    with device.stream(a):
        x = torch.ones(10, device="sim")
    b.wait_stream(a)
    c.wait_stream(b)
    with device.stream(c):
        x.add_(1)
    assert sim.report().races == []
    with device.stream(b):
        x.sum()
    assert len(sim.report().races) == 1


def test_copies_race_on_page_locked_memory(device: Any) -> None:
    """Promise: two copies on the same host bytes that nothing orders are reported."""
    a, b = device.Stream(), device.Stream()
    staging = device.pinned_empty(80).view(torch.float32)
    x, y = torch.ones(20, device="sim"), torch.ones(20, device="sim")
    device.synchronize()
    with device.stream(a):
        staging[:10].copy_(x[:10], non_blocking=True)
    with device.stream(b):
        y[10:].copy_(staging[10:], non_blocking=True)
        assert sim.report().races == []
        y[:10].copy_(staging[:10], non_blocking=True)
    (race,) = sim.report().races
    assert "copy to the host" in race and "copy to the device" in race


def test_disjoint_silences_its_own_reason_only(device: Any) -> None:
    """Promise: accesses under one reason are compared with all others, and the report tells what was silenced."""
    a, b = device.Stream(), device.Stream()
    x = torch.zeros(10, device="sim")
    device.synchronize()
    with device.stream(a), sim.disjoint("rows of two micro-batches"):
        x.add_(1)
    with device.stream(b):
        with sim.disjoint("rows of two micro-batches"):
            x.sum()
        assert sim.report().races == []
        with sim.disjoint("something else"):
            x.mean()
        assert len(sim.report().races) == 1
        x.amax()
    assert len(sim.report().races) == 2
    assert sim.report().annotations == {"rows of two micro-batches": 1, "something else": 0}


def test_a_detector_that_is_off_says_nothing(device: Any) -> None:
    """Promise: races=False costs no comparisons."""
    sim.configure(races=False)
    x = torch.zeros(10, device="sim")
    with device.stream(device.Stream()):
        x.sum()
    assert sim.report().races == []


def test_configure_finishes_what_is_queued(device: Any) -> None:
    """Promise: tensors and streams from before `configure` go on to work, and their past is no race."""
    a = device.Stream()
    with device.stream(a):
        x = torch.ones(5, device="sim")
    event = a.record_event()
    sim.configure(order="random", seed=1)
    event.wait()
    y = x + 1
    a.wait_stream(device.current_stream())
    with device.stream(a):
        z = y + x
    assert sim.report().races == []
    a.synchronize()
    assert z.inner.tolist() == [3.0] * 5


def test_shuffled_atomics_change_low_bits_by_seed(device: Any) -> None:
    """Promise: sums that are atomic on CUDA depend on the seed under `shuffle_atomics`, and only then; fixed ones never."""
    values = torch.randn(500, 2)
    index = torch.randint(3, (500,))

    def sums(**options: Any) -> list[torch.Tensor]:
        sim.configure(**options)
        v, i = values.to("sim"), index.to("sim")
        table = torch.zeros(3, 2, device="sim", requires_grad=True)
        (torch.nn.functional.embedding(i, table) * v).sum().backward()
        put = torch.zeros(3, 2, device="sim").index_put_((i,), v, accumulate=True)
        scattered = torch.zeros(3, 2, device="sim").scatter_add_(0, i[:, None].expand(500, 2), v)
        added = torch.zeros(3, 2, device="sim").index_add_(0, i, v)
        fixed = torch.segment_reduce(v, "sum", lengths=torch.tensor([100, 400], device="sim"), axis=0)
        return [x.cpu() for x in (table.grad, put, scattered, added, fixed)]

    plain = sums()
    runs = [sums(shuffle_atomics=True, seed=seed) for seed in range(6)]
    again = sums(shuffle_atomics=True, seed=3)
    for place in range(4):
        assert len({str(run[place].tolist()) for run in (plain, *runs)}) > 1
        assert torch.equal(again[place], runs[3][place])
        for run in runs:
            torch.testing.assert_close(run[place], plain[place], rtol=1e-4, atol=1e-4)
    assert all(torch.equal(run[4], plain[4]) for run in runs)
