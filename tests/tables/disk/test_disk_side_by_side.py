"""The disk tier, read by one thread while another writes: rows move, and the read gets the right bits."""

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
    """Every read of the store stops between looking up its places and reading them.

    Yields an event that is set then.
    """
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
    """In each step, writes batches while another batch, without the rows that it shares with them, is retrieved.

    The retrieve looks up its places before the first write begins and reads them after the last one has ended.
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
    """Promise: moves, cleaning and reuse of segments never touch what a read that has begun will read."""
    group = group_of(dim)
    twin, store = RowStore(group, 7), tiered(tmp_path, dram_rows, group, io)
    run_side_by_side(store, twin, np.random.default_rng(seed), 12, size, keys, writes)
    assert_same(twin, store)
    store.close()


@pytest.mark.slow
def test_rows_are_moved_and_segments_reused_meanwhile(tmp_path: Path) -> None:
    """What the test above relies on happens: segments are cleaned and reused."""
    twin, store = RowStore(group_of(), 7), tiered(tmp_path, 20)
    run_side_by_side(store, twin, np.random.default_rng(0), 150, 300, 600, 2)
    log = store.disk
    assert log.rows_moved > 0
    assert log.rows_written * log.record_bytes > 5 * log.file.bytes
    assert_same(twin, store)


def test_a_read_fails_if_retired_segments_are_reused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: if retired segments are reused at once, the checksum reports it."""
    monkeypatch.setattr(RetiredSegments, "retire", lambda retired, segment: retired._waiting.append((0, segment)))
    with pytest.raises(DiskTierError, match="checksum"):
        run_side_by_side(tiered(tmp_path, 20), RowStore(group_of(), 7), np.random.default_rng(0), 150, 300, 600, 2)


@pytest.mark.slow
@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), io=st.sampled_from(IOS))
def test_two_threads_that_never_wait(tmp_path: Path, seed: int, io: str) -> None:
    """Promise: as above, however the two threads interleave."""
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
    """Promise: a key in the index whose first row is still being written gets its first value."""
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
    """Promise: before a disk counts as full, the writer waits for the read that uses retired segments."""
    twin, store = RowStore(group_of(), 7), tiered(tmp_path, 5)
    rng = np.random.default_rng(2)
    keys, tables = np.arange(2000), np.zeros(2000, np.uint16)
    new = changed(rng, *retrieved(twin, tables, keys))
    for one in (twin, store):
        one.writeback(tables, keys, *new)
    waited: list[int] = []
    full_disk = threading.Event()

    def full(by: int, least: int) -> int:
        waited.append(len(store.disk._retired))
        full_disk.set()
        raise DiskTierError("no space")

    with read_begins_and_waits(store, full_disk) as reading, ThreadPoolExecutor(1) as pool:
        read = pool.submit(retrieved, store, tables[:50], keys[:50])
        assert reading.wait(PATIENCE)
        again = changed(rng, *new)
        store.writeback(tables, keys, *again)  # the segments that it empties are retired while the read runs
        third = changed(rng, *again)
        monkeypatch.setattr(store.disk.file, "grow", full)
        store.writeback(tables, keys, *third)
        np.testing.assert_array_equal(read.result()[0], new[0][:50])
    twin.writeback(tables, keys, *third)
    assert waited and waited[0] > 0
    assert_same(twin, store)


def test_a_retired_segment_waits_for_reads_that_may_use_it() -> None:
    """Promise: a segment can be reclaimed once all reads that began before it was retired have ended."""
    retired = RetiredSegments()
    retired.retire(1)
    assert retired.reclaim() == [1]
    retired.begin_read()
    retired.retire(2)
    retired.retire(3)
    assert retired.reclaim() == [] and len(retired) == 2
    retired.end_read()
    retired.begin_read()
    retired.retire(4)
    assert retired.reclaim() == [2, 3] and len(retired) == 1
    retired.end_read()
    retired.wait_for_read()
    assert retired.reclaim() == [4]
