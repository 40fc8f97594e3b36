"""Rows from checkpoints and exports: those that training left, and first values for all other keys."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from made import CHANGED, FULL, Table, groups, make
from nestpipe.checkpoint.folder import Checkpoint, Folder
from nestpipe.infer import block_file, export
from nestpipe.infer.block_layout import STORED, BlockLayout, Stored
from nestpipe.infer.checkpoint_rows import HeldFiles
from nestpipe.infer.export import export_for_serving
from nestpipe.infer.quantise import decode, encode
from nestpipe.infer.row_reader import Rows, rows_of_checkpoint, rows_of_export
from nestpipe.infer.serving_files import DataShape, read_serving
from nestpipe.tables.config import TableConfig
from nestpipe.tables.store import RowStore

SEED = 5
DIMS = {"item": 4, "shop": 4, "user": 3}
KEYS = st.lists(st.one_of(st.integers(-1000, 1000), st.integers(-(2**63), 2**63 - 1)), max_size=200)


def configs() -> list[TableConfig]:
    return [table for group in groups() for table in group.tables]


def chain_at(folder: Path, step: int = CHANGED) -> list[Checkpoint]:
    found = Folder(folder)
    return found.chain(found.read(step))


def exported(
    folder: Path, to: Path, stored: Stored | None = None, memory: int | None = None, step: int = CHANGED
) -> Rows:
    export_for_serving(chain_at(folder, step), to, DataShape([], 0), stored=stored)
    return rows_of_export(to, read_serving(to)[0], configs(), SEED, memory)


def mapped(folder: Path, step: int = CHANGED) -> Rows:
    chain = chain_at(folder, step)
    return rows_of_checkpoint(HeldFiles(chain), chain, configs(), SEED, None)


def expected(tables: dict[str, Table], table: str, keys: list[int]) -> np.ndarray:
    """Stored rows; for other keys what a store in training begins with."""
    group = next(group for group in groups() if table in [t.name for t in group.tables])
    number = [t.name for t in group.tables].index(table)
    values, state = np.empty((len(keys), group.dim), np.float32), np.empty((len(keys), group.state_width), np.float32)
    RowStore(group, SEED).retrieve(np.full(len(keys), number, np.uint16), np.array(keys, np.int64), values, state)
    for place, key in enumerate(keys):
        if key in tables[table]:
            values[place] = tables[table][key][0]
    return values


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Table], list[Rows]]:
    """What is in the tables, and every way to read it; caches of all rows, of a few, and of one."""
    where = tmp_path_factory.mktemp("made")
    tables = make(where / "checkpoints")
    readers = [mapped(where / "checkpoints"), exported(where / "checkpoints", where / "mapped")]
    for memory in (10**6, 3000, 100):
        readers += [exported(where / "checkpoints", where / f"cached{memory}", memory=memory)]
    return tables, readers


@given(st.sampled_from(list(DIMS)), st.lists(KEYS, min_size=1, max_size=3), st.data())
@settings(max_examples=150)
def test_any_keys_give_the_rows_of_training(
    opened: tuple[dict[str, Table], list[Rows]], table: str, reads: list[list[int]], data: st.DataObject
) -> None:
    """Promise: from the files of two workers and a chain with removals, memory-mapped or from disk through a cache of any size,
    any keys in any order give the stored rows, and first values for keys without one."""
    tables, readers = opened
    there = sorted(tables[table])
    for keys in reads:
        keys = keys + data.draw(st.lists(st.sampled_from(there), max_size=100))
        wanted = expected(tables, table, keys)
        for reader in readers:
            found = reader.read(table, np.array(keys, np.int64))
            assert found.dtype == np.float32 and found.shape == (len(keys), DIMS[table])
            assert found.tobytes() == wanted.tobytes()


def test_an_earlier_checkpoint_has_its_own_rows(tmp_path: Path) -> None:
    """Promise: a full checkpoint and an incremental one on it are two states, and removed keys are gone in the second."""
    make(tmp_path / "c")
    for step in (FULL, CHANGED):
        a, b = mapped(tmp_path / "c", step), exported(tmp_path / "c", tmp_path / f"e{step}", step=step)
        keys = np.arange(-1000, 1000)
        for table in DIMS:
            assert a.read(table, keys).tobytes() == b.read(table, keys).tobytes()
        if step == FULL:
            before = a.read("item", keys)
    assert (a.read("item", keys) != before).any()


def test_bad_keys_and_tables_are_one_line(opened: tuple[dict[str, Table], list[Rows]]) -> None:
    """Promise: keys that are no list of integers, and a table that is not there, are refused; no keys are fine."""
    for reader in opened[1]:
        assert reader.read("user", []).shape == (0, 3) and reader.dim == 0 and reader.dim_of("user") == 3  # type: ignore[arg-type]
        assert reader.read("user", np.array([3], np.int32)).shape == (1, 3)
        for bad in (np.zeros((2, 2), np.int64), np.array([0.5])):
            with pytest.raises(ValueError, match="1-D array of integer keys"):
                reader.read("user", bad)
        with pytest.raises(ValueError, match="no table 'users'; there are item, shop, user"):
            reader.read("users", np.array([1]))


def test_a_cache_stays_within_its_memory(tmp_path: Path) -> None:
    """Promise: however many keys are read, known or not, a cached reader holds no more bytes than it was given."""
    make(tmp_path / "c")
    memory = 20_000
    reader = exported(tmp_path / "c", tmp_path / "e", memory=memory)
    rng = np.random.default_rng(0)
    for _ in range(50):
        for table in DIMS:
            reader.read(table, rng.integers(-5000, 5000, 300))
    assert reader.nbytes() <= memory + 3 * 8192 + 3 * 1024  # an index of 1,024 entries is the smallest there is


@pytest.mark.parametrize("stored", ["float16", "int8"])
@pytest.mark.parametrize("memory", [None, 4000])
def test_fewer_bits_keep_rows_within_their_bound(tmp_path: Path, stored: Stored, memory: int | None) -> None:
    """Promise: a number of an int8 row is at most half a step of that row away, one of float16 2**-11 of itself; keys without a
    row still begin exactly as in training."""
    tables = make(tmp_path / "c")
    reader = exported(tmp_path / "c", tmp_path / "e", stored, memory)
    for table in DIMS:
        keys = [*tables[table], 10**6, -(10**12)]
        wanted, found = expected(tables, table, keys), reader.read(table, np.array(keys))
        known, far = np.abs(found - wanted)[:-2], found[-2:]
        assert far.tobytes() == wanted[-2:].tobytes()
        bound = np.abs(wanted[:-2]).max(axis=1, keepdims=True) / 127 / 2 * (1 + 1e-5)
        if stored == "float16":
            bound = np.abs(wanted[:-2]) * 2.0**-11 + 2.0**-25
        assert (known <= bound).all() and known.max() > 0
        again = reader.read(table, np.array(keys))
        assert again.tobytes() == found.tobytes()


@given(
    st.lists(st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3), min_size=1, max_size=20),
    st.sampled_from(STORED),
)
def test_encoding_is_within_its_bound(rows: list[list[float]], stored: Stored) -> None:
    """Promise: float32 and float64 are exact, float16 and int8 within their bound; a row of zeros stays zeros."""
    values = np.array(rows, np.float32)
    words, scales = encode(values, stored)
    found = decode(words.view(BlockLayout(3, stored).word), scales, stored).astype(np.float64)
    peaks = np.abs(values.astype(np.float64)).max(axis=1, keepdims=True)
    bounds = {"int8": peaks / 127 / 2 * 1.00001 + 1e-37, "float16": np.abs(values) * 2.0**-11 + 2.0**-25}
    assert (np.abs(found - values) <= bounds.get(stored, 0)).all()


def test_not_finite_rows_stay_that_and_too_large_ones_are_refused() -> None:
    """Promise: int8 makes all of a row with NaN or infinity NaN and touches no other; float16 refuses what it cannot hold."""
    rows = np.array([[1, np.nan], [np.inf, 1], [2, -2]], np.float32)
    words, scales = encode(rows, "int8")
    found = decode(words.view(np.uint8), scales, "int8")
    assert np.isnan(found[:2]).all() and (found[2] == [2, -2]).all()
    assert np.isnan(encode(rows, "float16")[0][0, 1]) and np.isinf(encode(rows, "float16")[0][1, 0])
    with pytest.raises(ValueError, match="70000, which is beyond float16"):
        encode(np.array([[7e4]], np.float32), "float16")


@given(st.integers(1, 20_000), st.sampled_from(STORED))
def test_blocks_hold_whole_rows_in_whole_sectors(dim: int, stored: Stored) -> None:
    """Promise: any width fits: a block is whole sectors, has at least one row, and its parts do not overlap."""
    layout = BlockLayout(dim, stored)
    assert layout.rows >= 1 and layout.block_bytes % 4096 == 0
    memory = np.zeros(2 * layout.block_bytes, np.uint8)
    blocks = layout.view(memory)
    blocks.words[:, 0], blocks.keys[:], blocks.scales[:], blocks.values[:] = 1, 2, 3.0, 4
    assert (blocks.words[:, 0] == 1).all() and (blocks.keys == 2).all() and (blocks.scales == 3).all()
    assert (blocks.values == 4).all() and blocks.keys.shape == (2, layout.rows)


def test_rows_are_sorted_out_of_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: an export of rows that are dealt into many files, and read in many rounds, is one of rows sorted at once."""
    tables = make(tmp_path / "c")
    monkeypatch.setattr(export, "BUCKET_BYTES", 200)
    monkeypatch.setattr(block_file, "READ_BYTES", 1)
    monkeypatch.setattr("nestpipe.infer.table_writer.PART_BYTES", 1)
    monkeypatch.setattr("nestpipe.infer.block_layout.SECTOR", 128)
    monkeypatch.setattr(os, "O_DIRECT", 0)  # which needs whole sectors
    for memory in (None, 3000):
        reader = exported(tmp_path / "c", tmp_path / f"e{memory}", memory=memory)
        for table in DIMS:
            keys = [*tables[table], *range(2000, 2100)]
            assert reader.read(table, np.array(keys)).tobytes() == expected(tables, table, keys).tobytes()
        assert not list((tmp_path / f"e{memory}").glob("bucket*"))


def test_ways_of_reading_a_disk_are_alike(tmp_path: Path) -> None:
    """Promise: io_uring and threads, direct and through the page cache, read the same blocks."""
    make(tmp_path / "c")
    exported(tmp_path / "c", tmp_path / "e")
    table = read_serving(tmp_path / "e")[0].tables[0]
    read = []
    for io in ("threads", "auto"):
        for direct in (True, False):
            file = block_file.BlockFile(
                tmp_path / "e" / table.file, table.layout, table.rows, table.salt, direct=direct, io=io
            )
            read.append(file.read(np.arange(file.blocks)).words[: file.blocks].tobytes())
            file.close()
    assert len(set(read)) == 1
