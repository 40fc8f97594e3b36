"""Parquet: what becomes of types, nulls and NaN, what is read, and errors that name file, column and row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nestpipe.data.batch import Batch
from nestpipe.data.hash import hash_text
from nestpipe.data.parquet import ParquetData
from nestpipe.data.source import DataError
from nestpipe.data.stream import Stream


def bags(column: pa.Array, tmp_path: Path, **fields: Any) -> list[list[int]]:
    """The bags that a sparse column becomes."""
    pq.write_table(pa.table({"x": column, "y": [0] * len(column)}), tmp_path / "t.parquet")
    data = ParquetData(str(tmp_path / "t.parquet"), {"f": "x"}, label="y", eval_fraction=0, **fields)
    (batch,) = Stream(data.open("train", 0), 100)
    return [bag.tolist() for bag in batch.sparse_features["f"].to_dense()]


def one_batch(table: pa.Table, tmp_path: Path, **fields: Any) -> Batch:
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    data = ParquetData(str(tmp_path / "t.parquet"), **{"sparse": {"f": "x"}, "label": "y", "eval_fraction": 0} | fields)
    (batch,) = Stream(data.open("train", 0), 100)
    return batch


A, B = hash_text(["a", "b"]).tolist()


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (pa.array([1, None, -3], pa.int64()), [[1], [], [-3]]),
        (pa.array([1, 255], pa.uint8()), [[1], [255]]),
        (pa.array([2**64 - 1, 2**63, 5], pa.uint64()), [[-1], [-(2**63)], [5]]),
        (pa.array([True, None, False]), [[1], [], [0]]),
        (pa.array(["a", None, "b"]), [[A], [], [B]]),
        (pa.array([b"a", b"b"], pa.large_binary()), [[A], [B]]),
        (pa.array([b"a", None], pa.binary(1)), [[A], []]),
        (pa.array(["a", None, "b", "a"]).dictionary_encode(), [[A], [], [B], [A]]),
        (pa.array([[1, 2], [], None, [3]]), [[1, 2], [], [], [3]]),
        (pa.array([[1, None, 2], [None], [3]]), [[1, 2], [], [3]]),
        (pa.array([["a", None], None, ["b", "a"]], pa.large_list(pa.string())), [[A], [], [B, A]]),
        (pa.array([[2**64 - 1]], pa.list_(pa.uint64())), [[-1]]),
        (pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int32(), 2)), [[1, 2], [], [3, 4]]),
        (pa.array([["a"], None, ["b", "a"]], pa.list_(pa.dictionary(pa.int8(), pa.string()))), [[A], [], [B, A]]),
        (pa.array([None, None], pa.null()), [[], []]),
    ],
)
def test_ids(tmp_path: Path, column: pa.Array, expected: list[list[int]]) -> None:
    """Integers as they are, text hashed, lists as bags; null ids and null lists are empty, nulls in lists are dropped."""
    assert bags(column, tmp_path) == expected


def test_dense_and_labels(tmp_path: Path) -> None:
    """Numbers of any type become float32; null and NaN in dense mean missing and become 0."""
    table = pa.table(
        {
            "x": [1, 2, 3],
            "y": pa.array([True, False, True]),
            "a": pa.array([1, None, 3], pa.int16()),
            "b": [0.5, float("nan"), None],
            "c": pa.array([None, None, None], pa.null()),
            "d": pa.array([1, 2, 3]).cast(pa.decimal128(21, 2)),
        }
    )
    batch = one_batch(table, tmp_path, dense=["b", "a", "c", "d"])
    assert batch.dense is not None and batch.labels is not None
    assert batch.dense.tolist() == [[0.5, 1, 0, 1], [0, 0, 0, 2], [0, 3, 0, 3]]
    assert batch.labels.tolist() == [1, 0, 1] and one_batch(table, tmp_path).dense is None


def test_weights(tmp_path: Path) -> None:
    """Weights go with their ids, also where a null id is dropped; features without weights weigh 1."""
    table = pa.table(
        {
            "x": [[1, None, 2], None, [], [3]],
            "w": pa.array([[0.5, 9, 1.5], None, [], [2.5]], pa.list_(pa.float32())),
            "z": [7, None, 8, 9],
            "y": [0, 0, 0, 1],
        }
    )
    batch = one_batch(table, tmp_path, sparse={"f": "x", "g": "z"}, weights={"f": "w"})
    assert batch.sparse_features["f"].values().tolist() == [1, 2, 3]
    assert batch.sparse_features["f"].weights().tolist() == [0.5, 1.5, 2.5]
    assert batch.sparse_features["g"].weights().tolist() == [1, 1, 1]
    assert one_batch(table, tmp_path).sparse_features.weights_or_none() is None


GOOD: dict[str, Any] = {"x": [1, 2, 3, 4], "y": [0.0, 1, 0, 1], "a": [0.0] * 4, "l": [[1], [2, 3], [], [4]]}


@pytest.mark.parametrize(
    ("changes", "fields", "message"),
    [
        ({"y": [0, 1, None, 1]}, {}, "row 2 .*'y' is null, which is not a finite number"),
        ({"y": [0, 1, 0, float("nan")]}, {}, "row 3 .*'y' is nan"),
        ({"a": [0, float("inf"), 0, 0]}, {"dense": ["a"]}, "row 1 .*'a' is inf"),
        ({"a": [0, 0, 0, 1e300]}, {"dense": ["a"]}, r"row 3 .*'a' is 1e\+300"),
        ({"w": [[1.0], [1.0], [], [1.0]]}, {"sparse": {"f": "l"}, "weights": {"f": "w"}},
         "row 1 .*2 ids in 'l' but 1 weights in 'w'"),
        ({"w": [[1.0], [1.0, None], [], [1.0]]}, {"sparse": {"f": "l"}, "weights": {"f": "w"}},
         "row 1 .*a weight in 'w' is nan"),
        ({"w": [1.0] * 4}, {"sparse": {"f": "l"}, "weights": {"f": "w"}},
         "column 'w' is double, but data.weights.f needs numbers to go with list<.*int64>"),
        ({}, {"sparse": {"f": "gone"}}, r"no column 'gone' \(mapped from data.sparse.f\); it has x, y, a, l"),
        ({}, {"label": "gone"}, r"no column 'gone' \(mapped from data.label\)"),
        ({}, {"dense": ["gone"]}, r"no column 'gone' \(mapped from data.dense\)"),
        ({}, {"sparse": {"f": "a"}}, "column 'a' is double, but data.sparse.f needs integers, text, binary, or lists"),
        ({}, {"dense": ["l"]}, "column 'l' is list<.*int64>, but data.dense needs numbers"),
        ({"y": ["no"] * 4}, {}, "column 'y' is string, but data.label needs numbers"),
        ({"l": [[[1]], [[2]], [], []]}, {"sparse": {"f": "l"}}, "column 'l' is list<.*list<.*int64>>, but"),
    ],
)  # fmt: skip
def test_errors_name_file_column_and_row(
    tmp_path: Path, changes: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    """What cannot be trained on is one line with the file, the column and, for a value, the row in the file."""
    with pytest.raises(DataError, match=f"t.parquet.*{message}") as caught:
        one_batch(pa.table(GOOD | changes), tmp_path, **fields)
    assert "\n" not in str(caught.value)


def write(path: Path, start: int, rows: int, **options: Any) -> None:
    pq.write_table(pa.table({"x": np.arange(start, start + rows), "y": np.zeros(rows)}), path, **options)


def ids(data: ParquetData, split: str = "train") -> list[int]:
    return [i for batch in Stream(data.open(split, 0), 7) for i in batch.sparse_features.values().tolist()]


def test_files(tmp_path: Path) -> None:
    """Folders, globs and lists; empty and rowless files are fine; marker files are not data; eval files of their own."""
    (tmp_path / "day=1").mkdir()
    write(tmp_path / "a.parquet", 0, 5)
    write(tmp_path / "b.parquet", 5, 0)
    (tmp_path / "c.parquet").write_bytes(b"")
    write(tmp_path / "day=1" / "d.parquet", 5, 15, row_group_size=4)
    (tmp_path / "_marker.parquet").write_text("not data")
    for paths in [str(tmp_path), str(tmp_path / "**" / "[a-d].parquet"), [str(tmp_path / "a.parquet"), str(tmp_path)]]:
        data = ParquetData(paths, {"f": "x"}, label="y", eval_fraction=0.25)
        assert ids(data) == list(range(15)) and ids(data, "eval") == list(range(15, 20))
        assert data.open("train", 0).piece == 5
    own = ParquetData(str(tmp_path / "day=1"), {"f": "x"}, label="y", eval_paths=[str(tmp_path / "a.parquet")])
    assert ids(own) == list(range(5, 20)) and ids(own, "eval") == list(range(5))
    nothing = ParquetData(str(tmp_path / "b.parquet"), {"f": "x"}, label="y").open("train", 0)
    assert nothing.extent == 0 and list(Stream(nothing, 4)) == []


def test_files_that_are_not_there_or_not_parquet(tmp_path: Path) -> None:
    """Every one is named in one line: no match, no file, another format, cut off, damaged inside."""
    write(tmp_path / "good.parquet", 0, 2000, compression="none", use_dictionary=False)
    content = (tmp_path / "good.parquet").read_bytes()
    (tmp_path / "text.parquet").write_text("user,item\n" * 9)
    (tmp_path / "cut.parquet").write_bytes(content[: len(content) // 2])
    (tmp_path / "torn.parquet").write_bytes(content[:4] + b"\xff" * 200 + content[204:])
    (tmp_path / "empty").mkdir()
    for name, message in [
        ("no*.parquet", "data.paths: no file matches .*no"),
        ("gone.parquet", "data.paths: no such file: .*gone.parquet"),
        ("empty", "data.paths: folder .*empty has no"),
        ("text.parquet", "text.parquet cannot be read as Parquet"),
        ("cut.parquet", "cut.parquet cannot be read as Parquet"),
        ("torn.parquet", "torn.parquet row group 0 cannot be read"),
    ]:
        data = ParquetData(str(tmp_path / name), {"f": "x"}, label="y")
        with pytest.raises(DataError, match=message) as caught:
            ids(data)
        assert "\n" not in str(caught.value)


def test_only_what_is_mapped_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interval opens the row groups it touches, and the mapped columns of them alone."""
    table = pa.table({"x": np.arange(40), "y": np.zeros(40), "big": ["x" * 100] * 40})
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=10)
    source = ParquetData(str(tmp_path / "t.parquet"), {"f": "x"}, label="y", eval_fraction=0).open("train", 0)
    asked: list[tuple[list[int], list[str]]] = []
    original = pq.ParquetFile.iter_batches

    def spy(self: Any, batch_size: int, row_groups: list[int], columns: list[str], **options: Any) -> Any:
        asked.append((row_groups, columns))
        return original(self, batch_size, row_groups, columns, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", spy)
    chunks = list(source.read(15, 25, 0))
    assert [int(i) for chunk, _ in chunks for i in chunk.sparse_features.values()] == list(range(15, 25))
    assert [int(end) for _, ends in chunks for end in ends] == list(range(16, 26))
    assert asked == [([1], ["x", "y"]), ([2], ["x", "y"])]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"paths": ""}, "data.paths must be a text"),
        ({"sparse": {}}, "data.sparse must map features to columns"),
        ({"sparse": {"f": 3}}, "data.sparse.f must be a text such as 'item_id', not 3"),
        ({"label": ""}, "data.label must be a text such as 'clicked', not ''"),
        ({"dense": "price"}, "data.dense must be a list of columns, not 'price'"),
        ({"weights": {"g": "w"}}, "data.weights.g: data.sparse has no feature 'g'"),
        ({"eval_fraction": -0.1}, "data.eval_fraction must be at least 0, not -0.1"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], message: str) -> None:
    """A wrong value is refused when the section is made, and the message names the field."""
    with pytest.raises(ValueError, match=message):
        ParquetData(**{"paths": "x", "sparse": {"f": "x"}, "label": "y"} | fields)
