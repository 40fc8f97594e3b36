"""Snapshots: a store's rows as they were at one moment, whatever training does while they are copied."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.tables.config import EmbeddingConfig
from nestpipe.tables.disk.tiered_store import DiskTier, TieredRowStore
from nestpipe.tables.group import TableGroup
from nestpipe.tables.keyed import KeyedRows
from nestpipe.tables.optimizers import RowWiseAdagrad
from nestpipe.tables.snapshot import Rows, Snapshot
from nestpipe.tables.store import RowStore

DIM = 4
Content = dict[tuple[int, int], tuple[bytes, bytes]]


def make_store(kind: str, path: Path) -> KeyedRows:
    tables = tuple(EmbeddingConfig(name, DIM, [name]) for name in ("a", "b"))
    group = TableGroup(tables, DIM, np.dtype(np.float32), RowWiseAdagrad(0.1))
    store = (
        RowStore(group, 1) if kind == "dram" else TieredRowStore(group, 1, 0, DiskTier(str(path), 3), segment_bytes=1)
    )
    store.follow_changes()
    return store


def write(store: KeyedRows, keys: list[int], stamp: float) -> None:
    """Writes like a batch: every key once, with values that no other batch writes."""
    pairs = np.array(sorted(set(keys)), np.int64)
    tables = (pairs % 2).astype(np.uint16)
    values = (stamp + pairs[:, None] / 1000 + np.arange(DIM) / 1e6).astype(np.float32)
    store.writeback(tables, pairs, values, values[:, :1].copy())


def content(store: KeyedRows) -> Content:
    tables, keys, slots = store.index.items()
    values, state = store.read(slots)
    rows = zip(tables.tolist(), keys.tolist(), values, state)
    return {(table, key): (v.tobytes(), s.tobytes()) for table, key, v, s in rows}


def add(found: Content, rows: Rows) -> None:
    for table, key, v, s in zip(rows.tables.tolist(), rows.keys.tolist(), rows.values, rows.state):
        assert (table, key) not in found, "a row was copied twice"
        found[table, key] = (v.tobytes(), s.tobytes())


def memory(rows: int) -> np.ndarray:
    """Memory for this many rows."""
    return np.empty(rows * (8 + 2 + 4 * DIM + 4), np.uint8)


def read_snapshot(snapshot: Snapshot, most: int = 3, part: int = 3) -> Content:
    found: Content = {}
    for rows in snapshot.shards(memory(most), part):
        add(found, rows)
    return found


Batches = st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=8), max_size=5)


@pytest.mark.parametrize("kind", ["dram", pytest.param("disk", marks=pytest.mark.slow)])
@given(before=Batches, then=Batches, during=Batches, after=Batches, most=st.integers(1, 9), part=st.integers(1, 9))
@settings(max_examples=60)
def test_a_snapshot_is_one_moment(
    kind: str,
    before: list[list[int]],
    then: list[list[int]],
    during: list[list[int]],
    after: list[list[int]],
    most: int,
    part: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A full snapshot has every row, later ones the changes, though batches write between any two parts."""
    store = make_store(kind, tmp_path_factory.mktemp("snapshot"))
    stamp = 0.0
    whole: Content = {}
    overdue: set[tuple[int, int]] = set()
    for number, batches in enumerate((before, then, during, after)):
        for keys in batches:
            stamp += 1
            write(store, keys, stamp)
        expected = content(store)
        touched = {(key % 2, key) for keys in batches for key in keys}
        snapshot = store.snapshot(full=number == 0)
        found: Content = {}
        meanwhile = iter(during if number < 3 else [])
        late: set[tuple[int, int]] = set()
        for rows in snapshot.shards(memory(most), part):
            add(found, rows)
            if keys := next(meanwhile, None):
                stamp += 1
                write(store, keys, stamp)
                late |= {(key % 2, key) for key in keys}
        if number == 0:
            assert found == expected
        else:
            assert set(found) >= touched and found.items() <= expected.items()
            assert set(found) <= touched | overdue
        overdue = late
        whole |= found
        assert whole == expected, "the chain differs from the store at that moment"
    store.close()


@pytest.mark.parametrize("kind", ["dram", "disk"])
def test_a_snapshot_is_one_moment_with_a_thread_that_writes_as_fast_as_it_can(kind: str, tmp_path: Path) -> None:
    """Rows that change while they are copied appear as they were: nothing torn, newer or missing."""
    store = make_store(kind, tmp_path)
    write(store, list(range(600)), 0.5)
    rng = np.random.default_rng(3)
    for round in range(6):
        expected = content(store)
        snapshot = store.snapshot(full=True)
        over = threading.Event()

        def train(over: threading.Event = over, stamp: int = round) -> None:
            while not over.is_set():
                write(store, rng.integers(0, 900, 40).tolist(), stamp + 1.0)

        thread = threading.Thread(target=train)
        thread.start()
        try:
            found = read_snapshot(snapshot, most=50, part=7)
        finally:
            over.set()
            thread.join()
        assert found == expected
    store.close()


def test_a_snapshot_without_copy_on_write_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: without copy-on-write the tests above would fail."""
    store = make_store("dram", tmp_path)
    write(store, list(range(20)), 0.5)
    expected = content(store)
    snapshot = store.snapshot(full=True)
    monkeypatch.setattr(Snapshot, "keep_copies", lambda self, rows: None)
    found: Content = {}
    with pytest.raises(AssertionError, match="rows copied of"):
        for rows in snapshot.shards(memory(5), 5):
            add(found, rows)
            write(store, list(range(20)), 1.5)
    assert found != expected


def test_an_abandoned_snapshot_is_over(tmp_path: Path) -> None:
    """After a failed checkpoint training copies nothing for it any more, and the next full snapshot has every row."""
    store = make_store("dram", tmp_path)
    write(store, list(range(20)), 0.5)
    snapshot = store.snapshot(full=True)
    next(snapshot.shards(memory(5), 5))
    snapshot.abandon()
    write(store, list(range(10)), 1.5)
    assert read_snapshot(store.snapshot(full=True)) == content(store)
