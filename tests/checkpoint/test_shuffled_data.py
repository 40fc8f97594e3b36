"""Runs on shuffled Parquet: resumed in mid-block, killed, with unreadable parts, and on any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from commands import Command, nestpipe, refused, until
from nestpipe.comm.world import World
from nestpipe.config.recipe import load_recipe, parse_recipe
from nestpipe.data.kinds import KINDS as DATA
from nestpipe.models.kinds import KINDS as MODELS
from nestpipe.train.checkpoints import find_resumed
from nestpipe.train.trainer import train
from runs import losses, steps_in
from workers import run

RECIPE = """
[data]
kind = "parquet"
paths = "{data}"
sparse = {{ f = "x", g = "z" }}
label = "y"
eval_fraction = 0.1
on_error = "skip"
shuffle = 37
[model]
kind = "dlrm"
dim = 4
bottom = [4]
top = [4]
[train]
batch_size = 10
epochs = 2
log_every = 1
[checkpoint]
every_steps = 3
keep = 9
"""


def write(folder: Path, files: int = 3, damaged: bool = False) -> Path:
    """Files of uneven row groups and, if `damaged`, one row group with a wrong bit; returns the recipe."""
    (folder / "data").mkdir()
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    draw = np.random.default_rng(5)
    for number in range(files):
        path, rows = folder / "data" / f"{number:03}.parquet", 90 + 11 * (number % 3)
        ids = draw.integers(0, 50, (2, rows))
        table = pa.table({"x": ids[0], "z": ids[1], "y": ((ids[0] + ids[1]) % 3 == 0).astype(float)})
        pq.write_table(table, path, row_group_size=16 + 3 * (number % 5), **options)
    if damaged:
        path = folder / "data" / "001.parquet"
        column = pq.ParquetFile(path).metadata.row_group(2).column(0)
        data = bytearray(path.read_bytes())
        data[column.data_page_offset + column.total_compressed_size - 8] ^= 1
        path.write_bytes(bytes(data))
    recipe = folder / "shuffled.toml"
    recipe.write_text(RECIPE.format(data=folder / "data"))
    return recipe


def trained(
    world: World, recipe_path: str, path: str, settings: list[str], from_step: int | None = None
) -> dict[str, Any]:
    """The summary of a run, or of what comes after a step."""
    recipe = load_recipe(Path(recipe_path), settings, DATA, MODELS)
    resumed = None
    if from_step is not None:
        resumed = find_resumed(recipe, Path(path), from_step, lambda text: parse_recipe(text, DATA, MODELS))
    return train(recipe, world, path, quiet=True, resumed=resumed, resuming=resumed is not None)


@pytest.mark.slow
def test_a_run_resumes_in_mid_block(tmp_path: Path) -> None:
    """Two workers, batches of 10 in blocks of 37, a row group that cannot be read: resumed from checkpoints in both epochs,
    the digest is that of the untouched run, and the same part is left out."""
    recipe = str(write(tmp_path, damaged=True))
    untouched = run(2, trained, recipe, str(tmp_path / "run"), [])[0]
    assert len(untouched["skipped"]["parts"]) == 1 and untouched["steps"] > 20
    for step in (18, 9, 3):
        again = run(2, trained, recipe, str(tmp_path / "run"), [], step)
        assert again[0]["digest"] == untouched["digest"], step
        assert again[0]["skipped"] == again[1]["skipped"] == untouched["skipped"]
    plain = run(2, trained, recipe, str(tmp_path / "plain"), ["data.shuffle=0"])[0]
    other = run(2, trained, recipe, str(tmp_path / "other"), ["data.shuffle=38"])[0]
    assert len({untouched["digest"], plain["digest"], other["digest"]}) == 3
    assert untouched["samples"] == plain["samples"] == other["samples"]


@pytest.mark.slow
def test_a_killed_run_is_resumed(tmp_path: Path) -> None:
    """SIGKILL of all processes while two workers train on shuffled files, then --resume: the digest of the untouched run."""
    recipe = write(tmp_path, files=40)
    arguments = ["train", str(recipe), "--workers", "2", "--quiet", "--json", "-"]
    untouched = nestpipe(tmp_path, *arguments, run="untouched").summary()
    killed = Command(tmp_path, arguments, run="killed")
    assert until(100, lambda: (killed.run / "checkpoints").exists() and max(steps_in(killed.run), default=0) >= 15)
    killed.end()
    assert not (killed.run / "summary.json").exists()
    resumed = nestpipe(tmp_path, "train", str(killed.run), "--resume", "--quiet", "--json", "-", run="killed").summary()
    assert resumed["digest"] == untouched["digest"] and resumed["samples"] == untouched["samples"]
    assert losses(killed.run) == losses(tmp_path / "untouched")


@pytest.mark.slow
@pytest.mark.parametrize("shuffle", [0, 37])
def test_streams_make_runs_of_any_workers_alike(tmp_path: Path, shuffle: int) -> None:
    """With train.streams, 1, 2 and 3 workers have the losses of every step within rounding: the global batches are the same.
    Without it, workers have streams of their own and the batches are others."""
    recipe = str(write(tmp_path))
    settings = [f"data.shuffle={shuffle}", "train.streams=2", "dense.dtype=float64", "tables.dtype=float64"]
    found = {}
    for workers in (1, 2, 3):
        path = tmp_path / f"on-{workers}"
        assert run(workers, trained, recipe, str(path), settings)[0]["samples"] == 2 * 273
        found[workers] = losses(path)
    assert found[1] == pytest.approx(found[2], rel=1e-9) and found[3] == pytest.approx(found[2], rel=1e-9)
    run(3, trained, recipe, str(tmp_path / "own"), [*settings, "train.streams=none"])
    assert len(losses(tmp_path / "own")) < len(found[2])


@pytest.mark.slow
def test_streams_stay_what_they_were(tmp_path: Path) -> None:
    """A resumed run keeps its streams on other workers; another number is refused in one line, as is one without samples."""
    recipe = write(tmp_path)
    arguments = ["train", str(recipe), "--quiet", "--json", "-"]
    first = nestpipe(tmp_path, *arguments, "--workers", "2", "--steps", "6", run="run")
    assert first.summary()["steps"] == 6
    again = ["train", str(tmp_path / "run"), "--resume", "--quiet", "--workers", "1"]
    refused(
        nestpipe(tmp_path, *again, "--set", "train.streams=3", run="run"),
        "train.streams is 3, but the run has 2 data streams since it began",
    )
    same = nestpipe(tmp_path, *again, "--set", "train.streams=2", "--set", "train.steps=none", "--json", "-", run="run")
    assert same.summary()["samples"] == 2 * 273
    refused(
        nestpipe(tmp_path, "train", str(recipe), "--quiet", "--set", "train.streams=1000"),
        "273 samples, fewer than the 1000 data streams: use --set train.streams=273",
    )
