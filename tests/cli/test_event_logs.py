"""An event log from the command line: what is refused, resumed and told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from commands import Ended, nestpipe, refused

RECIPE = """
[data]
kind = "interactions"
paths = "log"
cache = "cache"
max_length = 10
negatives = 4
{more}
[model]
kind = "hstu"
dim = 8
max_length = 10
[train]
batch_size = 16
epochs = 2
log_every = 1
[checkpoint]
every_steps = 2
"""


def write_log(folder: Path, name: str, seed: int, lines: tuple[str, ...] = ()) -> None:
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng(seed)
    rows = [f"{u},{i},{t}" for u, i, t in draw.integers(0, 60, (600, 3))]
    (folder / name).write_text("\n".join(["user_id,item_id,timestamp", *rows, *lines]) + "\n")


def train(folder: Path, *arguments: str, run: str = "run", more: str = "") -> Ended:
    (folder / "my.toml").write_text(RECIPE.format(more=more))
    return nestpipe(folder, "train", "my.toml", *arguments, run=run)


@pytest.mark.slow
def test_bad_data_is_exit_code_2_on_any_number_of_workers(tmp_path: Path) -> None:
    """The line is the same, and the refused run leaves its name free."""
    write_log(tmp_path / "log", "a.csv", 1)
    for workers in ("1", "2"):
        refused(train(tmp_path, "--workers", workers, "--quiet", more='user = "acount"'), "no column 'acount'")
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_resumes_on_the_same_log_only(tmp_path: Path) -> None:
    """A file more in the log's folder, of the same users, is noticed."""
    write_log(tmp_path / "log", "a.csv", 1)
    assert train(tmp_path, "--steps", "3").code == 0
    write_log(tmp_path / "log", "b.csv", 2)
    (tmp_path / "run" / "summary.json").unlink()
    ended = nestpipe(tmp_path, "train", "run", "--resume", "--set", "train.steps=none", run="run")
    assert ended.code == 2 and "the training data has changed since the checkpoint" in ended.err, ended.err
    (tmp_path / "log" / "b.csv").unlink()
    shutil.rmtree(tmp_path / "cache")  # it is made again
    assert nestpipe(tmp_path, "train", "run", "--resume", "--set", "train.steps=none", run="run").code == 0


@pytest.mark.slow
def test_what_was_left_out_is_told(tmp_path: Path) -> None:
    """On the terminal, and in data.json."""
    write_log(tmp_path / "log", "a.csv", 1, ("7,8", ",1,1"))
    ended = train(tmp_path, "--steps", "3", more='on_error = "skip"')
    assert ended.code == 0 and "data: 2 rows were left out; the first: " in ended.err, ended.err
    told = json.loads((tmp_path / "run" / "data.json").read_text())
    assert told["stages"][0]["events"] == 600 and "2 rows" in told["notes"][0]


def test_histories_longer_than_the_model_are_refused_at_once(tmp_path: Path) -> None:
    """Not when the first long one comes up, hours later."""
    write_log(tmp_path / "log", "a.csv", 1)
    refused(train(tmp_path, "--quiet", "--set", "data.max_length=15"), "raise model.max_length (10)")
    refused(
        train(tmp_path, "--quiet", "--set", "data.max_length=15", "--set", "data.shuffle=9"), "model.max_length (10)"
    )
