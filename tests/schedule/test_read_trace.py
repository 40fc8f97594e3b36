"""`nestpipe schedule RUN.json`: a real run's trace drawn, and one line for what is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nestpipe.cli.main import main
from nestpipe.schedule import build
from nestpipe.schedule.clock import nominal, run
from nestpipe.schedule.view.read_trace import excerpt, read_trace
from nestpipe.schedule.view.trace import VIRTUAL, merge


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two workers, the second one a little later."""
    actions = build("dbp", 6, 2)
    spans = run(actions, nominal(actions))
    path = tmp_path / "run.json"
    path.write_text(json.dumps(merge([spans, spans], [0.0, 0.5], VIRTUAL)))
    return path


def test_read_back(trace: Path) -> None:
    """What comes back is what was written: the same actions, at the same times up to a nanosecond."""
    actions = build("dbp", 6, 2)
    written = sorted((str(s.action), s.start, s.stop) for s in run(actions, nominal(actions)))
    read = sorted((str(s.action), s.start, s.stop) for s in read_trace(trace, 0))
    assert [name for name, *_ in read] == [name for name, *_ in written]
    assert all(abs(a - b) < 1e-6 for one, other in zip(read, written) for a, b in zip(one[1:], other[1:]))
    assert read_trace(trace, 1)[0].start == pytest.approx(0.5)


def test_an_excerpt_begins_and_ends_with_a_batch(trace: Path) -> None:
    spans = excerpt(read_trace(trace, 0), 2)
    begun = [s.action.batch for s in spans if s.action.stage == "sync"]
    assert begun == [2, 3] and min(s.start for s in spans) == 0.0
    under = [s for s in spans if s.action.stage == "retrieve" and s.action.batch == 3]
    compute = [s for s in spans if s.action.stage == "compute" and s.action.batch == 2]
    assert any(r.start < c.stop and c.start < r.stop for r in under for c in compute), "retrieve 3 runs under compute 2"
    assert len(excerpt(read_trace(trace, 0), 50)) == len(excerpt(read_trace(trace, 0), 6)), "no more than there is"


def test_drawn(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "run.svg"
    assert main(["schedule", str(trace), "--batches", "2", "--worker", "1", "--svg", str(picture)]) == 0
    assert "run, worker 1: 2 batches" in capsys.readouterr().out
    assert "compute 2.1" in picture.read_text()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b"[]", "not a trace"),
        (b'{"traceEvents": [{"ph": "X"}]}', "not a trace that nestpipe wrote"),
        (b'{"traceEvents": ["X"]}', "not a trace that nestpipe wrote"),
        (b'{"traceEvents": []}', "has no worker 0"),
    ],
)
def test_foreign_files(content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "foreign.json"
    path.write_bytes(content)
    assert main(["schedule", str(path)]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1


def test_what_only_a_schedule_has(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", str(trace), "--check"]) == 2
    assert "--check is for a schedule" in capsys.readouterr().err
    assert main(["schedule", str(trace), "--worker", "7"]) == 2
    assert "no worker 7: it has workers 0 to 1" in capsys.readouterr().err
