"""The disk tier read by one thread while another writes: rows move under the read, and it still finds the right bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_disk_tier import IOS, assert_same, batch_of, fill, group_of, retrieved, tiered

from nestpipe.keys.dedup import intersect_pairs
from nestpipe.tables.disk.file import DiskTierError
from nestpipe.tables.disk.retired_segments import RetiredSegments
from nestpipe.tables.disk.tiered_store import TieredRowStore
from nestpipe.tables.store import RowStore

Batch = tuple[np.ndarray, np.ndarray]
PATIENCE = 20.0


@contextmanager
def read_begins_and_waits(store: TieredRowStore, until: threading.Event) -> Iterator[threading.Event]:
    """Every read of the store stands still between the look at where its rows are and the disk.  Gives what tells of that."""
    reading, transfer = threading.Event(), store.disk._reading._io.transfer

    def waiting(*arguments: object) -> np.ndarray:
        reading.set()
        assert until.wait(PATIENCE), "the writer waits for the reader"
        return transfer(*arguments)  # type: ignore[arg-type]

    store.disk._reading._io.transfer = waiting  # type: ignore[method-assign]
    try:
        yield reading
    finally:
        store.disk._reading._io.transfer = transfer  # type: ignore[method-assign]


def changed(rng: np.random.Generator, values: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    new = values + rng.standard_normal(values.shape).astype(values.dtype)
    return new, state + rng.random(state.shape).astype(state.dtype)


def run_side_by_side(
    store: TieredRowStore, twin: RowStore, rng: np.random.Generator, steps: int, size: int, keys: int, writes: int
) -> None:
    """In each step batches are written while another, without the rows that it shares with them, is retrieved.

    The retrieve knows where its rows are before the first write begins, and reads them after the last one has ended.
    """
    for _ in range(steps):
        batches: list[Batch] = [batch_of(rng, size, keys) for _ in range(writes)]
        tables, mine = batch_of(rng, size, keys)
        shared = [intersect_pairs(*batch, tables, mine)[1] for batch in batches]
        skip = np.unique(np.concatenate(shared))
        wanted, wanted_state = retrieved(twin, tables, mine)
        values, state = np.full_like(wanted, np.nan), np.full_like(wanted_state, np.nan)
        written = threading.Event()
        with read_begins_and_waits(store, written) as reading, ThreadPoolExecutor(1) as pool:
            read = pool.submit(store.retrieve, tables, mine, values, state, skip)
            while not (reading.is_set() or read.done()):
                reading.wait(0.001)
            try:
                for batch in batches:
                    new = changed(rng, *retrieved(twin, *batch))
                    store.writeback(*batch, *new)
                    twin.writeback(*batch, *new)
            finally:
                written.set()
            read.result()
        kept = np.setdiff1d(np.arange(len(mine)), skip)
        np.testing.assert_array_equal(values[kept], wanted[kept])
        np.testing.assert_array_equal(state[kept], wanted_state[kept])
        assert np.isnan(values[skip]).all()


@pytest.mark.slow
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    dram_rows=st.sampled_from([1, 20, 200]),
    keys=st.sampled_from([60, 300, 1000]),
    size=st.sampled_from([10, 100, 400]),
    writes=st.integers(1, 3),
    dim=st.sampled_from([1, 16, 60]),
    io=st.sampled_from(IOS),
)
def test_a_read_finds_its_rows_however_much_is_written_meanwhile(
    tmp_path: Path, seed: int, dram_rows: int, keys: int, size: int, writes: int, dim: int, io: str
) -> None:
    """Promise: evictions, cleaning and new use of segments never reach what a read that has begun is going to read."""
    group = group_of(dim)
    twin, store = RowStore(group, 7), tiered(tmp_path, dram_rows, group, io)
    run_side_by_side(store, twin, np.random.default_rng(seed), 12, size, keys, writes)
    assert_same(twin, store)
    store.close()


def test_rows_are_moved_and_segments_used_again_meanwhile(tmp_path: Path) -> None:
    """What the test above relies on happens: cleaning, and a file that does not simply grow."""
    twin, store = RowStore(group_of(), 7), tiered(tmp_path, 20)
    run_side_by_side(store, twin, np.random.default_rng(0), 150, 300, 600, 2)
    log = store.disk
    assert log.rows_moved > 0
    assert log.rows_written * log.record_bytes > 5 * log.file.bytes
    assert_same(twin, store)


def test_without_limbo_a_read_finds_what_was_written_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: with segments used again at once, they do, and the checksum says so."""
    monkeypatch.setattr(RetiredSegments, "put", lambda limbo, segment: limbo._waiting.append((0, segment)))
    with pytest.raises(DiskTierError, match="checksum"):
        run_side_by_side(tiered(tmp_path, 20), RowStore(group_of(), 7), np.random.default_rng(0), 150, 300, 600, 2)


@pytest.mark.slow
@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), io=st.sampled_from(IOS))
def test_two_threads_that_wait_for_nothing(tmp_path: Path, seed: int, io: str) -> None:
    """Promise: as above, wherever the two happen to meet."""
    group = group_of()
    rng = np.random.default_rng(seed)
    twin, store = RowStore(group, 7), tiered(tmp_path, 50, group, io)
    fixed = np.arange(10_000, 10_400)
    tables = np.zeros(len(fixed), np.uint16)
    wanted = changed(rng, *retrieved(twin, tables, fixed))
    for one in (twin, store):
        one.writeback(tables, fixed, *wanted)
    over = threading.Event()

    def read_again_and_again() -> int:
        count = 0
        while not over.is_set() or count == 0:
            some = np.random.default_rng(count).permutation(len(fixed))[:200]
            values, state = retrieved(store, tables[some], fixed[some])
            np.testing.assert_array_equal(values, wanted[0][some])
            np.testing.assert_array_equal(state, wanted[1][some])
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        reads = pool.submit(read_again_and_again)
        try:
            for _ in range(60):
                batch = batch_of(rng, 200, 500)
                new = changed(rng, *retrieved(twin, *batch))
                store.writeback(*batch, *new)
                twin.writeback(*batch, *new)
        finally:
            over.set()
        assert reads.result() > 0
    assert_same(twin, store)
    store.close()


def test_a_row_that_is_being_written_for_the_first_time_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a key that has its number but no row yet gets its first value, not whatever was in the buffer."""
    twin, store = RowStore(group_of(), 7), tiered(tmp_path, 5)
    fill(store, 100)
    keys, tables = np.arange(500, 600), np.zeros(100, np.uint16)
    first = retrieved(twin, tables, keys)
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    append: Callable[..., np.ndarray] = store.disk.append

    def looking(*arguments: object) -> np.ndarray:
        seen.append(retrieved(store, tables, keys))
        return append(*arguments)

    monkeypatch.setattr(store.disk, "append", looking)
    store.writeback(tables, keys, first[0] + 1, first[1] + 1)
    assert seen
    for values, state in seen:
        np.testing.assert_array_equal(values, first[0])
        np.testing.assert_array_equal(state, first[1])
    np.testing.assert_array_equal(retrieved(store, tables, keys)[0], first[0] + 1)


def test_on_a_full_disk_a_write_waits_for_the_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: segments that a read keeps from being used are waited for before a disk is called full."""
    twin, store = RowStore(group_of(), 7), tiered(tmp_path, 5)
    rng = np.random.default_rng(2)
    keys, tables = np.arange(2000), np.zeros(2000, np.uint16)
    new = changed(rng, *retrieved(twin, tables, keys))
    for one in (twin, store):
        one.writeback(tables, keys, *new)
    waited: list[int] = []
    go_on = threading.Event()

    def full(by: int, least: int) -> int:
        waited.append(len(store.disk._limbo))
        go_on.set()
        raise DiskTierError("no room")

    with read_begins_and_waits(store, go_on) as reading, ThreadPoolExecutor(1) as pool:
        read = pool.submit(retrieved, store, tables[:50], keys[:50])
        assert reading.wait(PATIENCE)
        again = changed(rng, *new)
        store.writeback(tables, keys, *again)  # while the read runs, what it leaves is in limbo
        third = changed(rng, *again)
        monkeypatch.setattr(store.disk.file, "grow", full)
        store.writeback(tables, keys, *third)
        np.testing.assert_array_equal(read.result()[0], new[0][:50])
    twin.writeback(tables, keys, *third)
    assert waited and waited[0] > 0
    assert_same(twin, store)


def test_limbo_keeps_what_a_read_may_know() -> None:
    """Promise: a segment comes back when all reads that began before it was left are over, and not before."""
    limbo = RetiredSegments()
    limbo.put(1)
    assert limbo.take() == [1]
    limbo.begin()
    limbo.put(2)
    limbo.put(3)
    assert limbo.take() == [] and len(limbo) == 2
    limbo.end()
    limbo.begin()
    limbo.put(4)
    assert limbo.take() == [2, 3] and len(limbo) == 1
    limbo.end()
    limbo.wait()
    assert limbo.take() == [4]
