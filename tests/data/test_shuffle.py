"""Shuffled Parquet: an order that is a pure function of seed, epoch, sizes and block, for any workers and any place to go on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nestpipe.data.parquet import ParquetData
from nestpipe.data.shares import SharedStream
from nestpipe.data.shuffle import Shuffle
from nestpipe.data.source import shard
from nestpipe.data.stream import Position, Stream

SIZES = st.lists(st.integers(0, 40), max_size=12)
BLOCKS = st.integers(1, 100)


def order(shuffle: Shuffle, start: int, stop: int, epoch: int) -> list[int]:
    """The samples of some units, as numbers in the order of storage."""
    firsts = np.concatenate([[0], np.cumsum(shuffle.sizes)])
    found: list[int] = []
    for pick in shuffle.picks(start, stop, epoch):
        rows = [firsts[group] + wanted for group, wanted in zip(pick.groups, pick.rows)]
        assert all((np.diff(wanted) > 0).all() for wanted in pick.rows) and len(set(pick.groups)) == len(pick.groups)
        found += np.concatenate(rows)[pick.places].tolist()
    return found


def plain_order(sizes: list[int], block: int, seed: int, epoch: int) -> list[int]:
    """The same in plain Python, sample by sample: groups laid out in a drawn order, blocks of that drawn again."""
    from nestpipe.data.counter import derive, permutation

    samples = iter(range(sum(sizes)))
    groups = [[next(samples) for _ in range(size)] for size in sizes]
    layout = [s for g in permutation(len(sizes), derive(seed, "row groups", epoch)) for s in groups[g]]
    found: list[int] = []
    for number, start in enumerate(range(0, len(layout), block)):
        part = layout[start : start + block]
        found += [part[i] for i in permutation(len(part), derive(seed, "block", epoch, number))]
    return found


@given(SIZES, BLOCKS, st.integers(0, 3), st.integers(0, 3), st.integers(1, 5), st.data())
def test_the_order_is_that_of_plain_python(
    sizes: list[int], block: int, seed: int, epoch: int, workers: int, data: st.DataObject
) -> None:
    """Any interval of units gives its part of the oracle's order; workers together read every sample once."""
    shuffle = Shuffle(sizes, block, seed)
    expected = plain_order(sizes, block, seed, epoch)
    assert sorted(expected) == list(range(shuffle.extent)) and order(shuffle, 0, shuffle.extent, epoch) == expected
    start = data.draw(st.integers(0, shuffle.extent))
    stop = data.draw(st.integers(start, shuffle.extent))
    assert order(Shuffle(sizes, block, seed), start, stop, epoch) == expected[start:stop]
    shards = [shard(shuffle.extent, shuffle.piece, workers, rank) for rank in range(workers)]
    dealt = [sample for shares in shards for interval in shares for sample in order(shuffle, *interval, epoch)]
    assert sorted(dealt) == list(range(shuffle.extent))


@given(SIZES, BLOCKS, st.lists(st.booleans(), min_size=12, max_size=12))
def test_groups_that_are_not_there_leave_the_others_in_order(sizes: list[int], block: int, there: list[bool]) -> None:
    """What cannot be read is missing from the order, every other sample keeps its unit."""
    shuffle = Shuffle(sizes, block, 1)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    firsts = np.concatenate([[0], np.cumsum(sizes)])
    expected = [(s, unit + 1) for unit, s in enumerate(plain_order(sizes, block, 1, 0)) if there[owner[s]]]
    found: list[tuple[int, int]] = []
    for pick in shuffle.picks(0, shuffle.extent, 0):
        good = [there[group] for group in pick.groups]
        rows = [firsts[g] + rows for g, rows, is_there in zip(pick.groups, pick.rows, good) if is_there]
        places, ends = pick.order(good)
        if len(places):
            found += zip(np.concatenate(rows)[places].tolist(), ends.tolist())
    assert found == expected


@given(st.lists(st.integers(0, 40), min_size=2, max_size=12), st.integers(10, 100))
def test_epochs_and_seeds_have_orders_of_their_own(sizes: list[int], block: int) -> None:
    """No two of some epochs and seeds are alike, once there is something to shuffle."""
    if sum(sizes) < 30:
        return
    orders = [order(Shuffle(sizes, block, seed), 0, sum(sizes), epoch) for seed in range(3) for epoch in range(3)]
    assert all(one != other for one, other in itertools.combinations(orders, 2))


def test_a_block_mixes_and_groups_move() -> None:
    """Neighbours in the file are far apart: a rank correlation near 0, inside a block and over the epoch."""
    found = np.array(order(Shuffle([100] * 100, 2000, 7), 0, 10_000, 0))
    assert abs(np.corrcoef(found, np.arange(10_000))[0, 1]) < 0.2
    assert abs(np.corrcoef(found[:2000], np.arange(2000))[0, 1]) < 0.1
    assert len(set((found[:2000] // 100).tolist())) == 20, "a block reads its own row groups and no other"


@given(SIZES, BLOCKS)
def test_a_block_says_which_group_goes_on(sizes: list[int], block: int) -> None:
    """The group that is named to be kept is the one that the next block begins in, and only that."""
    shuffle = Shuffle(sizes, block, 2)
    picks = list(shuffle.picks(0, shuffle.extent, 1))
    for pick, following in itertools.pairwise(picks):
        shared = set(pick.groups) & set(following.groups)
        assert shared == ({pick.goes_on} if pick.goes_on is not None else set())
    assert not picks or picks[-1].goes_on is None


def write(folder: Path, groups: list[list[int]]) -> ParquetData:
    """A file for each list, with row groups of these sizes; column x numbers all rows."""
    folder.mkdir(exist_ok=True)
    first = 0
    for number, sizes in enumerate(groups):
        with pq.ParquetWriter(
            folder / f"{number:03}.parquet", pa.schema([("x", pa.int64()), ("y", pa.float32())])
        ) as file:
            for size in sizes:
                x = np.arange(first, first + size)
                file.write_table(pa.table({"x": x, "y": np.zeros(size, np.float32)}), row_group_size=max(1, size))
                first += size
    return ParquetData(str(folder), {"f": "x"}, label="y", eval_fraction=0)


def batches(stream: Any) -> Iterator[list[int]]:
    for batch in stream:
        yield batch.sparse_features.values().tolist()


FILES = st.lists(st.lists(st.integers(0, 30), max_size=4), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(FILES, st.integers(0, 60), st.integers(1, 4), st.integers(1, 20), st.integers(0, 40))
def test_streams_of_shuffled_files(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[int]], block: int, workers: int, size: int, cut: int
) -> None:
    """Uneven and empty files and row groups: every epoch has every sample once over all workers, and a stream goes on
    from any batch, in mid-block too, with what was to come."""
    data = replace(write(tmp_path_factory.mktemp("files"), groups), shuffle=block)
    total = sum(map(sum, groups))
    epochs: list[list[int]] = [[], []]
    for rank in range(workers):
        options: dict[str, Any] = {"rank": rank, "workers": workers, "epochs": 2}
        stream = Stream(data.open("train", 3), size, **options)
        found, positions = [], [Position()]
        for batch in batches(stream):
            found.append(batch)
            positions.append(stream.position)
            epochs[stream.position.epoch] += batch
        at = min(cut, len(found))
        again = Stream(data.open("train", 3), size, position=positions[at], **options)
        assert list(batches(again)) == found[at:]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(total))


@settings(max_examples=25, deadline=None)
@given(FILES, st.integers(0, 60), st.integers(1, 5), st.integers(1, 20), st.integers(0, 6))
def test_global_batches_do_not_depend_on_the_workers(
    tmp_path_factory: pytest.TempPathFactory, groups: list[list[int]], block: int, streams: int, size: int, cut: int
) -> None:
    """With a fixed number of streams, 1, 2, 3 and 7 workers have the same global batches in the same order, shuffled or not,
    also when another number of workers takes over in the middle."""
    source = replace(write(tmp_path_factory.mktemp("files"), groups), shuffle=block).open("train", 3)

    def run(workers: int, positions: dict[int, Position] | None = None, most: int = 1 << 30) -> Any:
        options: dict[str, Any] = {"workers": workers, "streams": streams, "epochs": 2, "positions": positions}
        ranks = [SharedStream(source, size, rank=rank, **options) for rank in range(workers)]
        found: list[list[int]] = []
        while len(found) < most:
            parts = [part for rank in ranks if (part := next(batches(rank), None)) is not None]
            if not parts:
                break
            found.append(sorted(itertools.chain(*parts)))
        at: dict[int, Position] = {}
        for rank in ranks:
            at |= rank.positions_after(len(found))
            rank.close()
        return found, at

    whole, _ = run(1)
    assert sorted(itertools.chain(*whole)) == sorted([*range(source.extent)] * 2)
    for workers in (2, 3, 7):
        assert run(workers)[0] == whole
    begun, positions = run(2, most=cut)
    assert begun + run(3, positions)[0] == whole


def test_without_shuffle_the_seed_changes_nothing(tmp_path: Path) -> None:
    """`shuffle = 0` is the order of the files, whatever the seed and the epoch; held-out samples are never shuffled."""
    data = write(tmp_path / "rows", [[5, 7], [], [11]])
    for seed in (0, 9):
        assert list(batches(Stream(data.open("train", seed), 23, epochs=2))) == [list(range(23))] * 2
    held_out = replace(data, shuffle=10, eval_fraction=0.5).open("eval", 9)
    assert list(batches(Stream(held_out, 23))) == [list(range(12, 23))]


def test_a_row_group_is_decoded_once_for_all_blocks_of_a_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups far larger than a block: a worker's piece is at least a row group, and decodes each it touches once."""
    data = replace(write(tmp_path / "rows", [[50, 50], [50]]), shuffle=4)
    source = data.open("train", 3)
    assert source.piece == 52
    asked: list[tuple[int, ...]] = []
    original = pq.ParquetFile.iter_batches

    def spy(self: Any, batch_size: int, row_groups: list[int], columns: list[str], **options: Any) -> Any:
        asked.append(tuple(row_groups))
        return original(self, batch_size, row_groups, columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    chunks = list(source.read(0, 150, 0))
    assert len(asked) == 3 and sum(len(chunk) for chunk, _ in chunks) == 150 and len(chunks) == 38


def test_files_with_other_types_are_shuffled_together(tmp_path: Path) -> None:
    """Integers in one file, text in lists in the next: each sample is what it is in file order."""
    pq.write_table(pa.table({"x": [1, 2, None, 4], "y": [0, 1, 0, 1]}), tmp_path / "a.parquet", row_group_size=2)
    texts = pa.array([["a"], [], ["b", "c"]]).cast(pa.list_(pa.dictionary(pa.int8(), pa.string())))
    pq.write_table(pa.table({"x": texts, "y": [True, True, False]}), tmp_path / "b.parquet")
    data = ParquetData(str(tmp_path), {"f": "x"}, label="y", eval_fraction=0)

    def samples(data: ParquetData) -> list[tuple[list[int], float]]:
        (batch,) = Stream(data.open("train", 1), 100)
        assert batch.labels is not None
        return list(zip([bag.tolist() for bag in batch.sparse_features["f"].to_dense()], batch.labels.tolist()))

    plain, shuffled = samples(data), samples(replace(data, shuffle=5))
    assert sorted(plain) == sorted(shuffled) and plain != shuffled


def test_a_bad_value_is_named_by_its_row_in_the_file(tmp_path: Path) -> None:
    """Shuffled or not, the message has the file and the row there."""
    table = pa.table({"x": np.arange(40), "y": [float("nan") if i == 31 else 0.0 for i in range(40)]})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=7)
    data = ParquetData(str(tmp_path), {"f": "x"}, label="y", eval_fraction=0, shuffle=9)
    with pytest.raises(ValueError, match=r"t\.parquet row 31 \(the first is 0\): 'y' is nan"):
        list(Stream(data.open("train", 1), 5))


@pytest.mark.parametrize(
    ("value", "message"), [(-1, "at least 0, not -1"), (True, "whole number, not True"), (1.5, "whole")]
)
def test_a_wrong_size_is_refused(value: Any, message: str) -> None:
    """`data.shuffle` is checked when the section is made."""
    with pytest.raises(ValueError, match=rf"data\.shuffle must be .*{message}"):
        ParquetData("x", {"f": "x"}, label="y", shuffle=value)
