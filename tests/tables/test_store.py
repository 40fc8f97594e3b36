"""RowStore: what creates rows, what a new row is, and what a row costs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nestpipe.tables.config import EmbeddingBagConfig, TableConfig
from nestpipe.tables.group import TableGroup, group_tables
from nestpipe.tables.optimizers import SGD, Adam, RowWiseAdagrad
from nestpipe.tables.store import RowStore

DIM = 8


def table(name: str, init: str = "uniform", scale: float = 0.01, dtype: str = "float32") -> TableConfig:
    return EmbeddingBagConfig(name, DIM, [name], init=init, init_scale=scale, dtype=dtype)


def group(*tables: TableConfig) -> TableGroup:
    return group_tables(tables, Adam())[0]


def read(store: RowStore, tables: np.ndarray | int, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values and state, read into buffers that hold garbage."""
    numbers = np.full(len(keys), tables, np.uint16) if isinstance(tables, int) else tables
    values = np.full((len(keys), store.group.dim), 7, store.group.dtype)
    state = np.full((len(keys), store.group.state_width), 7, store.group.dtype)
    store.retrieve(numbers, keys, values, state)
    return values, state


def test_retrieve_never_creates() -> None:
    """A lookup leaves no trace: no row, no slot, and the same first value with zero state every time."""
    store = RowStore(group(table("a")), seed=1)
    keys = np.array([5, -(2**63), 2**63 - 1, 5])
    values, state = read(store, 0, keys)
    again, _ = read(store, 0, keys)
    assert len(store) == 0 and store.index.slots_used == 0
    assert not state.any()
    np.testing.assert_array_equal(values, again)
    np.testing.assert_array_equal(values[0], values[3])


def test_writeback_creates_and_keeps() -> None:
    """Reads return the values and state that were written, for old and new keys together."""
    store = RowStore(group(table("a"), table("b")), seed=1)
    rng = np.random.default_rng(0)
    expected: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
    for _ in range(5):
        pairs = list({(int(t), int(k)) for t, k in zip(rng.integers(0, 2, 50), rng.integers(0, 60, 50))})
        tables = np.array([t for t, _ in pairs], np.uint16)
        keys = np.array([k for _, k in pairs], np.int64)
        values = rng.random((len(pairs), DIM), np.float32)
        state = rng.random((len(pairs), 2 * DIM), np.float32)
        store.writeback(tables, keys, values, state)
        expected.update(zip(pairs, zip(values.tolist(), state.tolist())))
    values, state = read(store, np.array([t for t, _ in expected], np.uint16), np.array([k for _, k in expected]))
    assert list(zip(values.tolist(), state.tolist())) == list(expected.values())
    assert len(store) == len(expected)
    for t in (0, 1):
        assert store.rows_of(t)[0].tolist() == sorted(k for number, k in expected if number == t)


def test_first_value_depends_on_seed_name_and_key_alone() -> None:
    """A new row is the same in any store, batch, order and table number; seed, name and key each change it."""
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 200)
    values, _ = read(RowStore(group(table("a")), seed=1), 0, keys)
    other = RowStore(group(table("z"), table("y", "normal"), table("a")), seed=1)
    other.writeback(
        np.zeros(9, np.uint16), keys[:9], np.zeros((9, DIM), np.float32), np.zeros((9, 2 * DIM), np.float32)
    )
    backwards, _ = read(other, 2, keys[::-1].copy())
    np.testing.assert_array_equal(backwards[::-1], values)
    np.testing.assert_array_equal(read(other, 2, keys[50:51])[0][0], values[50])
    for changed in (RowStore(group(table("a")), seed=2), RowStore(group(table("b")), seed=1)):
        assert (read(changed, 0, keys)[0] != values).mean() > 0.99
    assert (read(RowStore(group(table("a")), seed=1), 0, keys + 1)[0] != values).mean() > 0.99


def test_first_values_are_pinned() -> None:
    """First values must never change: checkpoints leave out rows that were never touched."""
    values, _ = read(RowStore(group(table("item", scale=1.0, dtype="float64")), seed=42), 0, np.array([0, 1]))
    np.testing.assert_array_equal(values[:, :2], PINNED)


PINNED = np.array([[-0.7782474674210904, 0.5198930019337842], [0.8858626769593827, 0.8105236985030597]])


@pytest.mark.parametrize("init", ["uniform", "normal"])
def test_moments(init: str) -> None:
    """First values follow the table's distribution: mean, deviation, range, and no correlation along a row."""
    values, _ = read(RowStore(group(table("a", init, 0.5, "float64")), seed=3), 0, np.arange(100_000))
    deviation = 0.5 / np.sqrt(3) if init == "uniform" else 0.5
    assert abs(values.mean()) < 5 * deviation / np.sqrt(values.size)
    assert abs(values.std() / deviation - 1) < 0.01
    kurtosis = ((values / deviation) ** 4).mean()
    assert abs(kurtosis - (1.8 if init == "uniform" else 3.0)) < 0.05
    if init == "uniform":
        assert values.min() >= -0.5 and values.max() < 0.5
    correlation = np.corrcoef(values.T) - np.eye(DIM)
    assert np.abs(correlation).max() < 0.02
    assert abs(np.corrcoef(values[:-1, 0], values[1:, 0])[0, 1]) < 0.02  # nor between neighbouring keys


def test_scale_zero_starts_at_zero() -> None:
    """init_scale = 0 is a table of zeros."""
    assert not read(RowStore(group(table("a", scale=0.0)), seed=3), 0, np.arange(10))[0].any()


def test_growth_moves_nothing() -> None:
    """Rows stay at their addresses while the store grows a thousandfold, so growth copies nothing."""
    store = RowStore(group_tables([table("a")], RowWiseAdagrad())[0], seed=1)
    one = np.zeros(1, np.uint16)
    store.writeback(one, np.array([9]), np.full((1, DIM), 3, np.float32), np.ones((1, 1), np.float32))
    addresses = (store.values.rows.ctypes.data, store.state.rows.ctypes.data, store.index.slot_keys.rows.ctypes.data)
    slot = store.index.find(np.array([9]))
    row = store.values.rows[slot[0]]
    for start in range(0, 50_000, 5_000):
        keys = np.arange(100 + start, 5_100 + start)
        store.writeback(
            np.zeros(5_000, np.uint16), keys, np.ones((5_000, DIM), np.float32), np.ones((5_000, 1), np.float32)
        )
    assert addresses == (
        store.values.rows.ctypes.data,
        store.state.rows.ctypes.data,
        store.index.slot_keys.rows.ctypes.data,
    )
    assert store.index.find(np.array([9])) == slot
    assert row.tolist() == [3.0] * DIM


def test_keys_without_state() -> None:
    """An optimizer without state stores none."""
    store = RowStore(group_tables([table("a")], SGD())[0], seed=1)
    store.writeback(
        np.zeros(2, np.uint16), np.array([1, 2]), np.ones((2, DIM), np.float32), np.empty((2, 0), np.float32)
    )
    values, state = read(store, 0, np.array([2, 1]))
    assert values.tolist() == [[1.0] * DIM] * 2 and state.shape == (2, 0)


OVERHEAD = """
import numpy as np
from pathlib import Path
from nestpipe.tables.config import EmbeddingBagConfig
from nestpipe.tables.group import group_tables
from nestpipe.tables.optimizers import RowWiseAdagrad
from nestpipe.tables.store import RowStore

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

store = RowStore(group_tables([EmbeddingBagConfig("a", 16, ["a"])], RowWiseAdagrad())[0], seed=1)
batch, rows = 100_000, 10_000_000
tables, values, state = np.zeros(batch, np.uint16), np.ones((batch, 16), np.float32), np.ones((batch, 1), np.float32)
store.writeback(tables, np.arange(batch), values, state)
before = resident()
for start in range(batch, rows, batch):
    store.writeback(tables, np.arange(start, start + batch), values, state)
assert len(store) == rows
print((resident() - before) / (rows - batch) - 17 * 4, store.overhead_per_row())
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
@pytest.mark.skipif(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 3 << 30, reason="needs 3 GB free")
def test_a_row_costs_at_most_32_bytes_more() -> None:
    """Each of ten million rows costs at most 32 bytes beyond values and state, as measured and as the store reports."""
    done = subprocess.run([sys.executable, "-c", OVERHEAD], capture_output=True, text=True, check=True, timeout=150)
    measured, said = map(float, done.stdout.split())
    assert measured <= 32
    assert abs(measured - said) < 3
