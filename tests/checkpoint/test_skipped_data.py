"""Unreadable Parquet with `data.on_error = "skip"`: skipped whole, equally on all workers and after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nestpipe.checkpoint.errors import CheckpointError
from nestpipe.comm.world import World
from nestpipe.config.recipe import load_recipe, parse_recipe
from nestpipe.data.kinds import KINDS as DATA
from nestpipe.data.parquet import ParquetData
from nestpipe.data.source import DataError
from nestpipe.data.stream import Stream
from nestpipe.models.kinds import KINDS as MODELS
from nestpipe.train.checkpoints import find_resumed
from nestpipe.train.trainer import train
from runs import log_of
from workers import run

GROUP = 20
"""Rows in a row group.  A file has five."""


def write(path: Path, start: int, rows: int = 5 * GROUP) -> None:
    table = pa.table(
        {"x": np.arange(start, start + rows), "y": (np.arange(start, start + rows) % 3 == 0).astype(float)}
    )
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(table, path, row_group_size=GROUP, **options)


def poison(path: Path, group: int) -> None:
    """Flips one bit of the last value of a row group's first column, which only the checksum reveals."""
    column = pq.ParquetFile(path).metadata.row_group(group).column(0)
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size - 8] ^= 1
    path.write_bytes(bytes(data))


def make(folder: Path) -> ParquetData:
    """Three files of 100 rows, and a truncated one: group 1 of the first and group 4 of the last are poisoned."""
    folder.mkdir(exist_ok=True)
    for number, name in enumerate("abd"):
        write(folder / f"{name}.parquet", 100 * number)
    content = (folder / "a.parquet").read_bytes()
    (folder / "c.parquet").write_bytes(content[: len(content) // 2])
    poison(folder / "a.parquet", 1)
    poison(folder / "d.parquet", 4)
    return ParquetData(str(folder), {"f": "x"}, label="y", eval_fraction=0, on_error="skip")


def ids(data: ParquetData, rank: int = 0, workers: int = 1) -> list[int]:
    stream = Stream(data.open("train", 0), 7, rank=rank, workers=workers)
    return [i for batch in stream for i in batch.sparse_features.values().tolist()]


GOOD = [i for i in range(300) if i not in range(20, 40) and i not in range(280, 300)]


@pytest.mark.parametrize("shuffle", [0, 9, 70])
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_unreadable_parts_are_skipped_whole(tmp_path: Path, workers: int, shuffle: int) -> None:
    """A truncated file and two row groups with a wrong bit each are skipped, and every other sample is read once, for any
    number of workers, though several share a row group and only one reads the wrong bit, shuffled or not."""
    data = replace(make(tmp_path / "data"), shuffle=shuffle)
    found = [i for rank in range(workers) for i in ids(data, rank, workers)]
    assert sorted(found) == GOOD
    source = data.open("train", 0)
    assert source.extent == 300 and source.skipped is not None
    assert [len(chunk) for chunk, _ in source.read(0, 300, 0)] and source.skipped.parts == {
        str(tmp_path / "data" / "c.parquet"): 0,
        str(tmp_path / "data" / "a.parquet") + " row group 1": 20,
        str(tmp_path / "data" / "d.parquet") + " row group 4": 20,
    }
    news = source.skipped.news()
    assert len(news) == 3 and "cannot be read as Parquet" in news[0] and not source.skipped.news()


def test_without_skip_the_run_ends(tmp_path: Path) -> None:
    make(tmp_path / "data")
    fails = ParquetData(str(tmp_path / "data"), {"f": "x"}, label="y")
    with pytest.raises(DataError, match=r"c\.parquet cannot be read as Parquet"):
        fails.open("train", 0)
    (tmp_path / "data" / "c.parquet").unlink()
    with pytest.raises(DataError, match=r"a\.parquet row group 1 cannot be read: .*[Cc][Rr][Cc]"):
        ids(fails)
    with pytest.raises(ValueError, match=r"data\.on_error must be 'fail' or 'skip', not 'maybe'"):
        ParquetData("x", {"f": "x"}, label="y", on_error="maybe")  # type: ignore[arg-type]


def test_an_invalid_value_still_ends_the_run(tmp_path: Path) -> None:
    """A NaN label is a mistake in the data or the mapping, not a damaged file."""
    pq.write_table(pa.table({"x": [1, 2], "y": [0.0, float("nan")]}), tmp_path / "n.parquet")
    with pytest.raises(DataError, match=r"row 1 .*'y' is nan"):
        ids(ParquetData(str(tmp_path), {"f": "x"}, label="y", eval_fraction=0, on_error="skip"))


def trained(world: World, folder: str, path: str, steps: int | None, resuming: bool) -> dict[str, Any]:
    where = Path(folder)
    recipe_text = where / "skip.toml"
    recipe = load_recipe(recipe_text, [f"train.steps={steps or 'none'}"], DATA, MODELS)
    resumed = find_resumed(recipe, Path(path), 6, lambda text: parse_recipe(text, DATA, MODELS)) if resuming else None
    return train(recipe, world, path, quiet=True, resumed=resumed, resuming=resuming)


RECIPE = """
[data]
kind = "parquet"
paths = "{data}"
sparse = {{ f = "x", g = "x" }}
label = "y"
eval_fraction = 0.1
on_error = "skip"
[model]
kind = "dlrm"
dim = 4
bottom = [4]
top = [4]
[train]
batch_size = 10
epochs = 2
[checkpoint]
every_steps = 3
keep = 9
"""


@pytest.mark.slow
def test_a_resumed_run_skips_the_same_parts(tmp_path: Path) -> None:
    """Two workers, interrupted in mid-epoch: the digest of an untouched run.  Summary and log name every part.  A skipped
    part stays out even if it is repaired meanwhile.  Data that has grown is refused."""
    make(tmp_path / "data")
    (tmp_path / "skip.toml").write_text(RECIPE.format(data=tmp_path / "data"))
    untouched = run(2, trained, str(tmp_path), str(tmp_path / "untouched"), None, False)[0]
    run(2, trained, str(tmp_path), str(tmp_path / "run"), 8, False)
    write(tmp_path / "data" / "a.parquet", 0)
    last = run(2, trained, str(tmp_path), str(tmp_path / "run"), None, True)
    assert last[0]["digest"] == untouched["digest"] and last[0]["samples"] == 2 * 250
    assert last[0]["skipped"] == last[1]["skipped"] == untouched["skipped"]
    assert last[0]["skipped"]["samples"] == 20 and len(last[0]["skipped"]["parts"]) == 2  # the other one is held out
    said = [line["skipped"] for line in log_of(tmp_path / "untouched") if "skipped" in line]
    assert any("c.parquet: it cannot be read as Parquet" in text for text in said)
    write(tmp_path / "data" / "e.parquet", 300)
    with pytest.raises(AssertionError, match="the training data had 270 units at the checkpoint and has 360 now"):
        run(2, trained, str(tmp_path), str(tmp_path / "run"), None, True)
    assert issubclass(CheckpointError, ValueError)
