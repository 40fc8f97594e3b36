"""Eviction from the command line: recipes, summaries, listed keys, and recorded horizons."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import Command, nestpipe, small

EVICTION = ["tables.admit_after=2", "tables.ttl_steps=3", "tables.max_rows=400", "tables.sweep_every=2"]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_evicted_keys_are_counted_and_listed(tmp_path: Path, workers: int) -> None:
    """The summary counts evicted keys over all workers; `nestpipe evicted` counts and lists the same keys."""
    command = Command(
        tmp_path, [*small(*EVICTION, "train.log_every=5", workers=workers), "--json", str(tmp_path / "s.json")]
    )
    ended = command.wait()
    assert ended.code == 0, ended.err
    assert "keys evicted: nestpipe evicted" in ended.err
    summary = json.loads((tmp_path / "s.json").read_text())
    assert sum(summary["evicted"].values()) > 50 and summary["waiting"] > 0 and summary["ttl_horizons"] == []
    lines = [json.loads(line) for line in (command.run / "metrics.jsonl").read_text().splitlines()]
    logged = [sum(line["evicted"].values()) for line in lines if "evicted" in line]
    assert logged == sorted(logged) and logged[-1] > 0 and lines[0]["memory"]["waiting_keys"] > 0
    assert not list((command.run / "evicted").glob("*.tmp"))

    counted = nestpipe(tmp_path, "evicted", str(command.run), "--json", "-").summary()
    assert counted["evicted"] == {t: n for t, n in summary["evicted"].items() if n}
    listed = nestpipe(tmp_path, "evicted", str(command.run), "--list", "--table", "f1").out.splitlines()
    assert len(listed) == summary["evicted"]["f1"]
    batches = [int(line.split("\t")[2]) for line in listed]
    assert batches == sorted(batches) and all(batch % 2 == 0 for batch in batches)


@pytest.mark.slow
def test_recorded_horizons_replace_the_clock(tmp_path: Path) -> None:
    """A run with ttl_minutes reports its horizons; with these, another schedule gives the same digest."""
    sets = ["tables.ttl_minutes=0.0002", "tables.sweep_every=2", "pipeline.micro_batches=2"]
    command = Command(tmp_path, [*small(*sets, "pipeline.schedule=nested"), "--json", "-"])
    first = command.wait().summary()
    assert first["ttl_horizons"] and sum(first["evicted"].values()) > 0
    given = f"tables.ttl_horizons={first['ttl_horizons']}"
    again = nestpipe(
        tmp_path, "train", str(command.run / "recipe.toml"), "--schedule", "serial", "--set", given, "--json", "-"
    ).summary()
    assert again["digest"] == first["digest"] and again["evicted"] == first["evicted"]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [EVICTION, ["tables.ttl_minutes=0.0002", "tables.sweep_every=2"]])
def test_verify_holds_with_eviction(tmp_path: Path, settings: list[str]) -> None:
    """`verify` also compares usage, waiting keys and evictions; the horizons of one run are passed to the other."""
    _, *rest = small(*settings)
    ended = nestpipe(tmp_path, "verify", *rest, "--schedule", "nested", "--steps", "16", "--json", "-")
    result = ended.summary()
    assert result["equal"] and result["compared"]["evicted"] > 0
    assert "evicted keys and" in ended.err


@pytest.mark.parametrize(
    "setting, message",
    [
        ("tables.admit_after=0", "tables.admit_after must be a whole number from 1"),
        ("tables.ttl_steps=0", "tables.ttl_steps must be"),
        ("tables.ttl_minutes=-1", "tables.ttl_minutes must be above 0"),
        ("tables.max_rows=0", "tables.max_rows must be"),
        ("tables.sweep_every=0", "tables.sweep_every must be"),
        ("tables.ttl_horizons=[[10, 2]]", "tables.ttl_horizons needs ttl_minutes"),
    ],
)
def test_a_bad_setting_is_one_line(tmp_path: Path, setting: str, message: str) -> None:
    """The error names the key."""
    ended = nestpipe(tmp_path, *small(setting))
    assert ended.code == 2 and message in ended.err and len(ended.err.splitlines()) == 1


def test_a_directory_that_is_not_a_run_is_one_line(tmp_path: Path) -> None:
    """`nestpipe evicted` says so if the directory is not a run."""
    ended = nestpipe(tmp_path, "evicted", str(tmp_path))
    assert ended.code == 2 and "is not a run directory" in ended.err and len(ended.err.splitlines()) == 1
