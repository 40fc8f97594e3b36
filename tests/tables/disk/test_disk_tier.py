"""The disk tier: bit-equal to the store in DRAM, whatever the budget, and one-line errors for every disk fault."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nestpipe.tables.config import EmbeddingBagConfig
from nestpipe.tables.disk import channel as disk_channel
from nestpipe.tables.disk import hot_rows, uring
from nestpipe.tables.disk import kernels as disk_kernels
from nestpipe.tables.disk import log as disk_log
from nestpipe.tables.disk.file import DiskTierError
from nestpipe.tables.disk.native import move_bytes
from nestpipe.tables.disk.preads import Preads
from nestpipe.tables.disk.tiered_store import DiskTier, TieredRowStore, warm_up_disk
from nestpipe.tables.group import TableGroup, group_tables
from nestpipe.tables.keyed import KeyedRows
from nestpipe.tables.optimizers import SGD, Adagrad, Adam, RowWiseAdagrad, SparseOptimizer
from nestpipe.tables.store import RowStore, make_store

OPTIMIZERS: list[SparseOptimizer] = [SGD(), RowWiseAdagrad(), Adagrad(), Adam()]


def io_uring_allowed() -> bool:
    try:
        uring.Ring(np.zeros(4096, np.uint8)).close()
    except OSError:
        return False
    return True


IOS = ["io_uring", "threads"] if io_uring_allowed() else ["threads"]
KERNELS = [
    kernel
    for module in (hot_rows, disk_kernels, *([uring] if "io_uring" in IOS else []))
    for name, kernel in vars(module).items()
    if hasattr(kernel, "signatures") and name not in ("mix", "_word", "_put_word", "_check_of")
]


def group_of(dim: int = 8, dtype: str = "float32", optimizer: SparseOptimizer | None = None) -> TableGroup:
    tables = [
        EmbeddingBagConfig("item", dim, ["item"], dtype),
        EmbeddingBagConfig("user", dim, ["user"], dtype, init="normal"),
    ]
    return group_tables(tables, optimizer or RowWiseAdagrad())[0]


def tiered(path: Path, dram_rows: int, group: TableGroup | None = None, io: str = "auto") -> TieredRowStore:
    """A store with segments of one block, so that small tests fill, clean and reuse many of them."""
    return TieredRowStore(group or group_of(), 7, 0, DiskTier(str(path), dram_rows), io, segment_bytes=4096)


def batch_of(rng: np.random.Generator, size: int, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Tables and keys of a batch, no pair twice."""
    drawn = np.unique(rng.integers(0, 2 * keys, size))
    rng.shuffle(drawn)
    return (drawn % 2).astype(np.uint16), drawn // 2 - keys // 4


def retrieved(store: KeyedRows, tables: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    group = store.group
    values = np.full((len(keys), group.dim), np.nan, group.dtype)
    state = np.full((len(keys), group.state_width), np.nan, group.dtype)
    store.retrieve(tables, keys, values, state)
    return values, state


def train(stores: list[KeyedRows], rng: np.random.Generator, size: int, keys: int) -> None:
    """One step on each store: all must read the same bits, then all get the same new rows."""
    tables, batch = batch_of(rng, size, keys)
    read = [retrieved(store, tables, batch) for store in stores]
    for values, state in read[1:]:
        np.testing.assert_array_equal(values, read[0][0])
        np.testing.assert_array_equal(state, read[0][1])
    values, state = read[0]
    values = values + rng.standard_normal(values.shape).astype(values.dtype)
    state = state + rng.random(state.shape).astype(state.dtype)
    for store in stores:
        store.writeback(tables, batch, values, state)


def assert_same(a: KeyedRows, b: KeyedRows) -> None:
    assert len(a) == len(b)
    for table in range(len(a.group.tables)):
        (keys_a, slots_a), (keys_b, slots_b) = a.rows_of(table), b.rows_of(table)
        np.testing.assert_array_equal(keys_a, keys_b)
        for part_a, part_b in zip(a.read(slots_a), b.read(slots_b)):
            np.testing.assert_array_equal(part_a, part_b)


def fill(store: KeyedRows, count: int) -> np.ndarray:
    """Rows of keys 0..count-1 of table 0, in batches of 100.  Returns the values."""
    rng = np.random.default_rng(3)
    values = rng.random((count, store.group.dim)).astype(store.group.dtype)
    for start in range(0, count, 100):
        keys = np.arange(start, min(start + 100, count))
        state = np.ones((len(keys), store.group.state_width), store.group.dtype)
        store.writeback(np.zeros(len(keys), np.uint16), keys, values[keys], state)
    return values


@pytest.mark.slow
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32),
    dram_rows=st.integers(1, 60),
    keys=st.sampled_from([20, 200, 2000]),
    size=st.sampled_from([1, 10, 100, 400]),
    dim=st.sampled_from([1, 3, 16]),
    dtype=st.sampled_from(["float32", "float64"]),
    optimizer=st.sampled_from(OPTIMIZERS),
    io=st.sampled_from(IOS),
    align=st.sampled_from([512, 4096]),
)
def test_random_batches_give_the_bits_of_the_store_in_dram(
    tmp_path: Path, seed: int, dram_rows: int, keys: int, size: int, dim: int, dtype: str,
    optimizer: SparseOptimizer, io: str, align: int,
) -> None:  # fmt: skip
    """Promise: values, state, new rows and walk order do not depend on where rows are, whatever the budget."""
    group = group_of(dim, dtype, optimizer)
    rng = np.random.default_rng(seed)
    twin, store = RowStore(group, 7), tiered(tmp_path, dram_rows, group, io)
    store.disk.file.align = align
    for _ in range(12):
        train([twin, store], rng, size, keys)
    assert_same(twin, store)
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("io", IOS)
def test_a_long_run_cleans_dead_records(tmp_path: Path, io: str) -> None:
    """Promise: the file stays near the size of its live records, and rows that cleaning moves keep their bits."""
    twin, store = RowStore(group_of(), 7), tiered(tmp_path, 100, io=io)
    rng = np.random.default_rng(1)
    for _ in range(300):
        train([twin, store], rng, 300, 1000)
    assert_same(twin, store)
    log = store.disk
    assert log.rows_moved > 0
    live = log.live * log.record_bytes
    assert len(store) - 100 == log.live
    assert log.file.bytes <= live * 1.5 * 1.2 + 2 * 16 * 4096 * 1.125


def test_lookups_change_nothing(tmp_path: Path) -> None:
    """Promise: retrieve and read create no row, move no row and write nothing."""
    store = tiered(tmp_path, 10)
    fill(store, 200)
    before = (store._where.rows[:200].copy(), store.disk.rows_written, len(store))
    retrieved(store, np.zeros(300, np.uint16), np.arange(300))
    store.read(store.rows_of(0)[1])
    np.testing.assert_array_equal(store._where.rows[:200], before[0])
    assert (store.disk.rows_written, len(store)) == before[1:]


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.booleans())
def test_skipped_rows_are_not_touched_and_can_be_written_back(
    tmp_path: Path, seed: int, share: float, on_disk: bool
) -> None:
    """Promise: `retrieve` leaves skipped rows alone, and its result serves `writeback` for them too."""
    rng = np.random.default_rng(seed)
    group = group_of()
    store: KeyedRows = tiered(tmp_path, 16, group) if on_disk else RowStore(group, 7)
    twin = RowStore(group, 7)
    train([store, twin], rng, 60, 100)
    tables, keys = batch_of(rng, 60, 100)
    skip = np.flatnonzero(rng.random(len(keys)) < share)
    values, state = retrieved(twin, tables, keys)
    mine, mine_state = np.full_like(values, np.nan), np.full_like(state, np.nan)
    found = store.retrieve(tables, keys, mine, mine_state, skip)
    assert np.isnan(mine[skip]).all() and np.isnan(mine_state[skip]).all()
    mine[skip], mine_state[skip] = values[skip], state[skip]
    assert np.array_equal(mine, values) and np.array_equal(mine_state, state)
    for one, where in ((store, found), (twin, None)):
        one.writeback(tables, keys, mine + 1, mine_state + 1, where)
    assert_same(store, twin)
    store.close()


def test_a_row_is_in_dram_or_on_disk(tmp_path: Path) -> None:
    """Promise: the budget is kept, and every row is in exactly one place, which no other row has."""
    store = tiered(tmp_path, 50)
    rng = np.random.default_rng(5)
    for _ in range(50):
        train([store], rng, 80, 300)
        where = store._where.rows[: len(store)]
        assert len(np.unique(where)) == len(where) and not np.any(where == 0)
        assert np.count_nonzero(where > 0) <= 50 and where.max() <= 50
        assert np.count_nonzero(where < 0) == store.disk.live


def test_hot_rows_stay_in_dram(tmp_path: Path) -> None:
    """Promise: rows that every batch uses are not replaced by rows that are used once."""
    store = tiered(tmp_path, 100)
    hot = np.arange(40)
    for step in range(30):
        keys = np.concatenate([hot, 1000 + 50 * step + np.arange(50)])
        tables = np.zeros(len(keys), np.uint16)
        store.writeback(tables, keys, *retrieved(store, tables, keys))
    read = store.disk.rows_read
    retrieved(store, np.zeros(40, np.uint16), hot)
    assert store.disk.rows_read == read


def test_small_records_share_sectors(tmp_path: Path) -> None:
    """Promise: a row of dim 16 with row-wise state costs 88 bytes on disk, not a sector."""
    store = TieredRowStore(group_of(16), 7, 0, DiskTier(str(tmp_path), 1000))
    fill(store, 101_000)
    assert store.disk.record_bytes == 88
    assert store.disk.file.bytes <= 100_000 * 88 + (16 << 20)


def test_records_larger_than_a_segment(tmp_path: Path) -> None:
    """Promise: any dimension works (Adam of dim 1000 in float64: 24 kB a record, against segments of 4 kB)."""
    group = group_of(1000, "float64", Adam())
    twin, store = RowStore(group, 7), tiered(tmp_path, 3, group)
    rng = np.random.default_rng(2)
    for _ in range(6):
        train([twin, store], rng, 20, 40)
    assert_same(twin, store)


@pytest.mark.parametrize(("dtype", "dim"), [("float32", 5), ("float64", 5), ("float64", 1000)])
def test_warm_up_compiles_all_kernels(tmp_path: Path, dtype: str, dim: int) -> None:
    """Promise: after `warm_up_disk`, training compiles no kernel, and no file is left."""
    group = group_of(dim, dtype, Adam())
    warm_up_disk(group, DiskTier(str(tmp_path), 10))
    compiled = sum(len(kernel.signatures) for kernel in KERNELS)
    assert all(kernel.signatures for kernel in KERNELS)
    store = tiered(tmp_path, 20, group)
    rng = np.random.default_rng(0)
    for _ in range(30):
        train([store], rng, 50, 200)
    assert (
        store.disk.rows_moved > 0 or store.disk.per_segment == 1
    )  # with one record per segment there is nothing to clean
    assert sum(len(kernel.signatures) for kernel in KERNELS) == compiled
    assert list(tmp_path.iterdir()) == []


def test_make_store_chooses(tmp_path: Path) -> None:
    """Promise: without a tier all rows are in DRAM; with one, some are on disk."""
    assert isinstance(make_store(group_of(), 0, 0, None), RowStore)
    assert isinstance(make_store(group_of(), 0, 0, DiskTier(str(tmp_path), 5)), TieredRowStore)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """Promise: the file has no name while it is used, so not even a killed run leaves it on the disk."""
    store = tiered(tmp_path, 10)
    fill(store, 200)
    assert list(tmp_path.iterdir()) == []
    fd = store.disk.file.fd
    store.close()
    with pytest.raises(OSError):
        os.fstat(fd)
    with pytest.raises(DiskTierError, match="closed"):
        fill(store, 200)


def test_io_uring_forbidden_means_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: if the kernel forbids io_uring, the tier falls back to threads."""

    def forbidden(*_: object) -> None:
        raise OSError(errno.EPERM, "io_uring_setup: Operation not permitted")

    monkeypatch.setattr(disk_channel, "Ring", forbidden)
    store = tiered(tmp_path, 10)
    assert store.disk.io == Preads.name
    values = fill(store, 200)
    np.testing.assert_array_equal(retrieved(store, np.zeros(200, np.uint16), np.arange(200))[0], values)


def test_no_kernel_holds_the_gil() -> None:
    """Promise: other lanes run Python while rows are read, written, checked or moved."""
    assert all(kernel.targetoptions.get("nogil") for kernel in [*KERNELS, move_bytes])


# Faults.


def only_line(error: pytest.ExceptionInfo[DiskTierError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@contextmanager
def buffered(store: TieredRowStore) -> Iterator[int]:
    """The store's file, opened again without direct I/O.  Writes are on the disk afterwards."""
    fd = os.open(f"/proc/self/fd/{store.disk.file.fd}", os.O_RDWR)
    yield fd
    os.fsync(fd)
    os.close(fd)


def flip(store: TieredRowStore, offset: int) -> None:
    """Flips one bit of the file."""
    with buffered(store) as file:
        byte = os.pread(file, 1, offset)
        os.pwrite(file, bytes([byte[0] ^ 4]), offset)


@pytest.mark.parametrize("at", [0, 9, 16, 30, 47, 50])
@pytest.mark.parametrize("io", IOS)
def test_a_flipped_bit_is_named(tmp_path: Path, at: int, io: str) -> None:
    """Promise: a flipped bit anywhere in a record is an error that names file, table and key."""
    store = tiered(tmp_path, 10, io=io)
    fill(store, 210)
    row = 120
    place = -store._where.rows[row] - 1
    offset = place // store.disk.per_segment * 4096 + place % store.disk.per_segment * store.disk.record_bytes
    flip(store, offset + at)
    with pytest.raises(DiskTierError) as error:
        retrieved(store, np.zeros(210, np.uint16), np.arange(210))
    text = only_line(error)
    assert "key 120 of table 'item'" in text and store.disk.file.path in text and "checksum" in text
    retrieved(store, np.zeros(50, np.uint16), np.arange(50))  # other rows can still be read


@pytest.mark.parametrize("at", [0, 20])
def test_cleaning_notices_a_flipped_bit(tmp_path: Path, at: int) -> None:
    """Promise: cleaning a segment with a damaged record is an error; the row does not silently disappear."""
    store = tiered(tmp_path, 10)
    fill(store, 1000)
    place = -store._where.rows[500] - 1
    log = store.disk
    flip(store, place // log.per_segment * 4096 + place % log.per_segment * log.record_bytes + at)
    with pytest.raises(DiskTierError, match="checksum"):
        log.clean(int(place // log.per_segment), store._where.rows)


def test_a_record_of_another_row_or_another_time_is_noticed(tmp_path: Path) -> None:
    """Promise: valid records in the wrong place (a lost or misdirected write) are errors."""
    store = tiered(tmp_path, 10)
    fill(store, 1000)
    log = store.disk
    with buffered(store) as file:
        os.pwrite(file, os.pread(file, log.segment_bytes, 0), log.segment_bytes)
    with pytest.raises(DiskTierError, match="checksum"):
        retrieved(store, np.zeros(1000, np.uint16), np.arange(1000))

    store = tiered(tmp_path, 10)
    fill(store, 1000)
    with buffered(store) as file:
        old = os.pread(file, store.disk.file.bytes, 0)
    fill(store, 1000)
    fill(store, 1000)
    with buffered(store) as file:
        os.pwrite(file, old, 0)  # as if none of the later writes had reached the disk
    with pytest.raises(DiskTierError, match="checksum"):
        retrieved(store, np.zeros(1000, np.uint16), np.arange(1000))


@pytest.mark.parametrize("io", IOS)
def test_a_truncated_file_is_named(tmp_path: Path, io: str) -> None:
    """Promise: a short read is an error that names the row and the number of bytes read."""
    store = tiered(tmp_path, 10, io=io)
    fill(store, 1000)
    os.truncate(store.disk.file.fd, 8192)
    with pytest.raises(DiskTierError) as error:
        retrieved(store, np.zeros(1000, np.uint16), np.arange(1000))
    text = only_line(error)
    assert "truncated" in text and "of table 'item'" in text and store.disk.file.path in text


def fails_without_a_trace(store: TieredRowStore, twin: RowStore) -> None:
    """Writes until the disk is full.  Then the store is as it was before the last batch, and can still be read."""
    rng = np.random.default_rng(0)
    with pytest.raises(DiskTierError) as error:
        for _ in range(10_000):
            tables, keys = batch_of(rng, 200, 100_000)
            values, state = retrieved(twin, tables, keys)
            values = values + 1
            store.writeback(tables, keys, values, state)
            twin.writeback(tables, keys, values, state)
    text = only_line(error)
    for word in (
        "No space left on device",
        "tables.disk_path",
        "tables.dram_rows",
        "MB more",
        "table 'item' and 1 more",
    ):
        assert word in text
    assert len(store) > 100
    assert np.count_nonzero(store._where.rows[: store.index.slots_used] < 0) == store.disk.live
    assert_same(twin, store)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True)
    if made.returncode:
        pytest.skip("cannot mount a small disk here")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.parametrize("io", IOS)
def test_a_full_disk_says_what_to_change(small_disk: Path, io: str) -> None:
    """Promise: a full disk is a one-line error, and the batch that met it leaves no trace."""
    fails_without_a_trace(tiered(small_disk, 30, io=io), RowStore(group_of(), 7))


def test_a_full_disk_while_growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: as above, on file systems that report a full disk when blocks are allocated."""
    allocate = os.posix_fallocate

    def small(fd: int, offset: int, length: int) -> None:
        if offset + length > 1 << 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", small)
    fails_without_a_trace(tiered(tmp_path, 30), RowStore(group_of(), 7))


@pytest.mark.parametrize("writes", range(100, 106))
def test_a_full_disk_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """Promise: as above, on file systems that report it only when a block is written; a batch is undone as a whole."""
    store = tiered(tmp_path, 30)
    transfer: Callable[..., np.ndarray] = store.disk._writing._io.transfer
    count = 0

    def failing(writing: bool, fd: int, offsets: np.ndarray, lengths: np.ndarray, spots: np.ndarray) -> np.ndarray:
        nonlocal count
        moved = transfer(writing, fd, offsets, lengths, spots)
        count += writing
        if writing and count > writes:
            moved[0] = -errno.ENOSPC
        return moved

    monkeypatch.setattr(store.disk._writing._io, "transfer", failing)
    fails_without_a_trace(store, RowStore(group_of(), 7))


def test_bad_settings_are_named(tmp_path: Path) -> None:
    """Promise: an invalid setting is rejected with the name of the key to change."""
    with pytest.raises(ValueError, match=r"tables\.dram_rows"):
        DiskTier(str(tmp_path), 0)
    with pytest.raises(ValueError, match=r"tables\.disk_path"):
        DiskTier("", 1)
    with pytest.raises(DiskTierError, match=r"tables\.disk_path"):
        tiered(tmp_path / "none", 1)


def test_the_log_of_several_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a batch larger than the staging memory is read in several rounds, and every row is right."""
    monkeypatch.setattr(disk_log, "STAGING_BYTES", 8192)
    monkeypatch.setattr(disk_log, "GAP_BYTES", 0)
    store = tiered(tmp_path, 10)
    values = fill(store, 3000)
    keys = np.random.default_rng(0).permutation(3000)[:1500]
    np.testing.assert_array_equal(retrieved(store, np.zeros(1500, np.uint16), keys)[0], values[keys])
