"""`nestpipe schedule`: what it prints and writes, and one line for whatever is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nestpipe.cli.main import main
from nestpipe.schedule import BUILDERS, EXACT, Action, Options, dbp
from nestpipe.schedule.view.trace import problems


def stale(step: int, micro_batches: int, start: int, options: Options) -> list[Action]:
    """dbp without the copies of `sync`."""
    return [
        replace(a, effects=tuple(e for e in a.effects if e.kind != "copy")) if a.stage == "sync" else a
        for a in dbp(step, micro_batches, start, options)
    ]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize("schedule", BUILDERS)
def test_a_grid_and_a_proof(schedule: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", schedule, "--batches", "3", "--micro", "2", "--check"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{schedule}: 3 batches of 2 micro-batches, ends at")
    for label in (
        "retrieve 2",
        "embed 2.1",
        "writeback 0",
        "weight_grad 1",
    ):  # a cell begins with a bar, or goes on in a new line
        assert any(f"│{label}" in line or f"…{label}" in line for line in lines), label
    assert max(map(len, lines[:-1])) <= 100
    label = (
        "exact: "
        if schedule in EXACT
        else "not exact, by design: rows shared with the batch before are stale by one batch"
    )
    assert lines[-1].startswith(label) and "actions" in lines[-1] and "pairs" in lines[-1] and "classes" in lines[-1]


def test_a_schedule_that_is_not_exact_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Exit 1, and the two actions and the rows are named."""
    monkeypatch.setitem(BUILDERS, "stale", stale)
    assert main(["schedule", "stale", "--check", "--json", str(tmp_path / "stale.json")]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("not exact: update 0 and compute 1.0, rows in batches 0 and 1: ")
    assert json.loads((tmp_path / "stale.json").read_text())["check"]["exact"] is False
    assert main(["schedule", "stale"]) == 0


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = {flag: tmp_path / f"dbp.{flag}" for flag in ("svg", "trace", "json")}
    flags = [part for flag, place in places.items() for part in (f"--{flag}", str(place))]
    assert main(["schedule", "dbp", "--check", *flags]) == 0
    assert places["svg"].read_text().startswith("<svg ")
    assert problems(json.loads(places["trace"].read_text())) == []
    result = json.loads(places["json"].read_text())
    assert result["check"]["exact"] is True and result["ends"]["dbp"] < result["ends"]["serial"]
    retrieve = next(a for a in result["actions"] if (a["stage"], a["batch"]) == ("retrieve", 2))
    assert retrieve["waits"] == ["route 2", "sync 1", "writeback 0"] and retrieve["lane"] == "storage"
    assert retrieve["stop"] > retrieve["start"]


def test_json_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "dbp", "--batches", "2", "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["batches"] == 2 and "retrieve 1" in printed.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nestde"], ["must be one of serial, dbp", "'nestde'"]),
        (["dbp", "--batches", "0"], ["--batches", "1 to 32", "'0'"]),
        (["dbp", "--batches", "many"], ["--batches", "'many'"]),
        (["dbp", "--batches", "9" * 5000], ["--batches"]),
        (["dbp", "--micro=-1"], ["--micro", "1 to 32", "'-1'"]),
        (["dbp", "--micro", "1.5"], ["--micro", "'1.5'"]),
        (["dbp", "--svg", "nowhere/dbp.svg"], ["--svg nowhere/dbp.svg", "no folder 'nowhere'"]),
        (["dbp", "--trace", "."], ["--trace .", "folder"]),
        (["dbp", "--json", "nowhere/dbp.json"], ["--json nowhere/dbp.json"]),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["schedule", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("nestpipe: ") and printed.err.count("\n") == 1
    assert all(word in printed.err for word in words), printed.err
    assert list(tmp_path.iterdir()) == []


def test_no_torch_and_no_numpy() -> None:
    """Schedules are plain Python: the command answers at once, on any machine."""
    code = (
        "import sys; from nestpipe.cli.main import main; main(['schedule', 'dbp', '--check']);"
        "print([m for m in ('torch', 'numpy', 'numba') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"
