"""Long histories from the command line: trained, told, and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import nestpipe, refused

RECIPE = """
[data]
kind = "histories"
users = 200
items = 400
groups = 4
median_length = 20
max_length = 10
negatives = 4
[model]
kind = "hstu"
dim = 8
max_length = 10
[train]
batch_size = 16
"""


@pytest.mark.slow
def test_a_run_tells_the_best_possible_hit_rate(tmp_path: Path) -> None:
    """In data.json, in the summary and on the terminal; and no run does better but by chance."""
    (tmp_path / "my.toml").write_text(RECIPE)
    ended = nestpipe(tmp_path, "train", "my.toml", "--workers", "2", run="run")
    assert ended.code == 0, ended.err
    told = json.loads((tmp_path / "run" / "data.json").read_text())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    best = summary["best_possible"]
    assert best["hr@10"] == pytest.approx(told["best"]["hr@10"]) and best["users"] == 200 == told["lengths"]["users"]
    assert 0 < summary["metrics"]["hr@10"] < best["hr@10"] + 0.15
    assert f"best possible, over 200 users: HR@10 {best['hr@10']:.4f}" in ended.err
    assert f"data: best possible HR@10 {best['hr@10']:.4f}" in ended.err


@pytest.mark.slow
def test_too_many_items_for_an_evaluation(tmp_path: Path) -> None:
    """One line; without an evaluation they train."""
    (tmp_path / "my.toml").write_text(RECIPE.replace("items = 400", "items = 1_099_511_627_776"))
    refused(nestpipe(tmp_path, "train", "my.toml", "--quiet"), "set data.eval_users = 0")
    ended = nestpipe(tmp_path, "train", "my.toml", "--set", "data.eval_users=0", "--steps", "2", "--json", "sum.json")
    assert ended.code == 0, ended.err
    assert "best_possible" not in json.loads((tmp_path / "sum.json").read_text())
