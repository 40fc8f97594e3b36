"""Criteo text: values, empty fields, byte intervals, and errors that say where."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nestpipe.data.criteo as criteo
from nestpipe.data.criteo import CriteoData, CriteoSource
from nestpipe.data.source import DataError
from nestpipe.data.stream import Stream
from nestpipe.files import Location
from tiny import samples_of, write_criteo


def line(label: str = "1", integers: str = "", ids: str = "") -> str:
    """A line whose first integers and ids are given, separated by spaces; `-` stands for a missing one."""
    columns = [label]
    for given_values, count in [(integers, 13), (ids, 26)]:
        values = ["" if v == "-" else v for v in given_values.split()]
        columns += values + [""] * (count - len(values))
    return "\t".join(columns) + "\n"


def open_text(path: Path, text: str) -> CriteoSource:
    path.write_text(text)
    return CriteoData(str(path), eval_fraction=0).open("train", 0)


def test_values(tmp_path: Path) -> None:
    """Dense is log(1 + max(x, 0)), missing is 0; ids are 32-bit values, a missing id is an empty bag."""
    text = line("1", "5 -2 - 0", "ffffffff - 0 1A2b") + line("0").replace("\n", "\r\n") + line("0", "1").rstrip("\n")
    (batch,) = Stream(open_text(tmp_path / "day", text), 10)
    assert batch.labels is not None and batch.labels.tolist() == [1, 0, 0]
    assert batch.dense is not None and batch.dense.shape == (3, 13)
    assert np.allclose(batch.dense[0, :4].numpy(), [np.log(6), 0, 0, 0]) and batch.dense[2, 0] == np.float32(np.log(2))
    features = batch.sparse_features
    assert features.keys() == [f"C{c}" for c in range(1, 27)]
    assert features["C1"].values().tolist() == [2**32 - 1] and features["C3"].values().tolist() == [0]
    assert features["C4"].values().tolist() == [0x1A2B] and features["C2"].lengths().tolist() == [0, 0, 0]
    assert features.values().numel() == 3


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("1" + "\t" * 37 + "\n", "day line 3: 38 columns where Criteo has 40"),
        ("1" + "\t" * 40 + "\n", "day line 3: 41 columns where Criteo has 40"),
        ("\n", "day line 3: 1 columns where Criteo has 40"),
        (line(ids="a b xyz"), "day line 3 column 17: 'xyz' is not a hex id"),
        (line(ids="123456789"), "day line 3 column 15: '123456789' is not a hex id"),
        (line(integers="1 2.5"), "day line 3 column 3: '2.5' is not an integer"),
        (line(integers="--"), "day line 3 column 2: '--' is not an integer"),
        (line(label="2"), r"day line 3 column 1: '2' is not a label \(0 or 1\)"),
        (line(label=""), r"day line 3 column 1: '' is not a label \(0 or 1\)"),
    ],
)
@pytest.mark.parametrize("second", ["", "zzz"])
def test_errors_name_file_line_and_column(tmp_path: Path, bad: str, message: str, second: str) -> None:
    """The first wrong line is found wherever reading began, with its number in the file."""
    text = line() * 2 + bad + line(ids=second)
    source = open_text(tmp_path / "day", text)
    for start in [0, 1, len(line()) * 2]:
        with pytest.raises(DataError, match=message):
            list(source.read(start, source.extent, 0))
    assert sum(len(chunk) for chunk, _ in source.read(0, len(line()) * 2, 0)) == 2


@settings(max_examples=15, deadline=None)
@given(st.integers(1500, 6000), st.lists(st.floats(0, 1), max_size=4))
def test_blocks_and_cuts_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, block: int, cuts: list[float]
) -> None:
    """Whatever the size of blocks, and wherever the bytes are cut, all lines are read once and in order."""
    files = write_criteo(tmp_path_factory.mktemp("cut"))
    source = CriteoSource([Location(str(file)) for file in files])
    whole = [s for chunk, _ in source.read(0, source.extent, 0) for s in samples_of(chunk)]
    edges = sorted([0, source.extent, *(int(cut * source.extent) for cut in cuts)])
    before, criteo.BLOCK = criteo.BLOCK, block
    try:
        parts = [s for a, b in pairwise(edges) for chunk, _ in source.read(a, b, 0) for s in samples_of(chunk)]
    finally:
        criteo.BLOCK = before
    assert parts == whole and len(whole) == 137


def test_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line longer than a block is an error and not a loop."""
    monkeypatch.setattr(criteo, "BLOCK", 100)
    source = open_text(tmp_path / "day", line() + "1" * 500 + "\n" + line())
    with pytest.raises(DataError, match="day line 2: longer than 100 bytes"):
        list(source.read(0, source.extent, 0))


def test_files(tmp_path: Path) -> None:
    """Missing, compressed and empty files; globs; eval files of their own."""
    with pytest.raises(DataError, match=r"data.paths: no such file: .*gone"):
        CriteoData(str(tmp_path / "gone")).open("train", 0)
    with pytest.raises(DataError, match=r"data.paths: no file matches .*day_\*"):
        CriteoData(str(tmp_path / "day_*")).open("train", 0)
    for name in ["day_0.gz", "day_0"]:
        (tmp_path / name).write_bytes(gzip.compress(line().encode()))
        with pytest.raises(DataError, match=f"{name} is compressed: unpack it .* or convert it to Parquet"):
            CriteoData(str(tmp_path / name)).open("train", 0)
    (tmp_path / "empty").write_text("")
    (tmp_path / "one").write_text(line() * 3)
    (tmp_path / "two").write_text(line() * 2)
    data = CriteoData([str(tmp_path / "empty"), str(tmp_path / "o*")], eval_paths=str(tmp_path / "two"))
    assert [len(batch) for split in ("train", "eval") for batch in Stream(data.open(split, 0), 9)] == [3, 2]
    assert list(Stream(CriteoData(str(tmp_path / "empty")).open("train", 0), 9)) == []
    with pytest.raises(ValueError, match=r"data.paths must be a text or a list of texts such as 'day_\*', not \(\)"):
        CriteoData()


def test_a_file_that_shrinks(tmp_path: Path) -> None:
    """A file that was cut off after it was opened is named."""
    source = open_text(tmp_path / "day", line() * 4)
    (tmp_path / "day").write_text(line())
    with pytest.raises(DataError, match="day was cut off"):
        list(source.read(0, source.extent, 0))
