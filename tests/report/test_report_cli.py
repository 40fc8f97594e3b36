"""`nestpipe report`: tells what it was given, writes whole files, and answers what it cannot show in one line."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from made_up import a_bench, a_data, a_run, a_summary, a_trace
from nestpipe.cli.main import main
from nestpipe.report.files import ReportError
from nestpipe.report.page import embedded, page, write_page
from nestpipe.report.read import read

BAD = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>\u2028\ud800"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a refused command said: one line."""
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("nestpipe: ") and error.count("\n") == 1 and "Traceback" not in error, error
    return error


def test_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """RUN/report.html, FILE.html beside FILE.json, or --out; the path is what is printed."""
    run = a_run(tmp_path / "run")
    bench, trace = tmp_path / "b.json", tmp_path / "t.json"
    bench.write_text(json.dumps(a_bench()))
    trace.write_text(json.dumps(a_trace()))
    for what, out in ((run, run / "report.html"), (bench, tmp_path / "b.html"), (trace, tmp_path / "t.html")):
        assert main(["report", str(what)]) == 0
        assert capsys.readouterr().out == f"{out}\n" and out.read_text().startswith("<!doctype html>")
    other = tmp_path / "other.html"
    assert (
        main(["report", str(run), "--out", str(other)]) == 0 and other.read_text() == (run / "report.html").read_text()
    )
    assert main(["report", str(run)]) == 0, "again, over the page that is there"
    assert sorted(path.name for path in run.iterdir()) == [
        "metrics.jsonl",
        "recipe.toml",
        "report.html",
        "summary.json",
        "trace.json",
    ]


def test_json_is_what_the_page_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench = tmp_path / "b.json"
    bench.write_text(json.dumps(a_bench()))
    assert main(["report", str(bench), "--json", "-"]) == 0
    told = capsys.readouterr()
    data = json.loads(told.out)
    assert data["kind"] == "bench" and told.err == f"{tmp_path / 'b.html'}\n"
    html = (tmp_path / "b.html").read_text()
    inside = html.split('id="data">')[1].split("</script>")[0]
    assert json.loads(inside).items() >= data.items()
    assert main(["report", str(bench), "--out", "-"]) == 0 and capsys.readouterr().out == html


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"{", "cut off"),
        (json.dumps(a_bench()).encode()[:-40], "cut off"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"[]", "neither a trace nor"),
        (b'{"a": 1}', "neither a trace nor"),
        (b"[" * 100_000, "nested too deeply"),
        (b"1" * 5000, "not JSON"),
        (b'{"rungs": []}', "has no rungs"),
        (b'{"rungs": 7}', "has no rungs"),
        (b'{"rungs": ["x"]}', "rung 1"),
        (b'{"rungs": [{"name": "x", "step_ms_all": [1e999]}]}', "rung 1"),
        (b'{"rungs": [{"name": "x", "step_ms_all": [NaN]}]}', "rung 1"),
        (b'{"rungs": [{"name": "x", "step_ms_all": []}]}', "rung 1"),
        (b'{"rows": [1]}', "neither a trace nor"),
        (b'{"traceEvents": 1}', "not a trace"),
        (b'{"traceEvents": []}', "has no actions"),
        (b'{"traceEvents": [{"ph": "X"}]}', "not a trace that nestpipe wrote"),
        (b'{"traceEvents": ["X"]}', "not a trace that nestpipe wrote"),
        (b'{"traceEvents": [[]]}', "not a trace that nestpipe wrote"),
    ],
)
def test_files_that_cannot_be_shown(
    content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each in one line that names the file; and no page is left."""
    path = tmp_path / "given.json"
    path.write_bytes(content)
    error = told(capsys, str(path))
    assert words in error and "given.json" in error
    assert [found.name for found in tmp_path.iterdir()] == ["given.json"]


@pytest.mark.parametrize(
    "change",
    [
        {"ts": float("inf")},
        {"ts": float("nan")},
        {"dur": 1e300},
        {"args": {"stage": "load", "batch": 10**400, "micro": -1}},
        {"args": {"stage": "load", "batch": "x", "micro": -1}},
        {"args": {"stage": ["load"], "batch": 0, "micro": -1}},
        {"pid": "0"},
    ],
)
def test_traces_that_lie(change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = a_trace()
    event = next(event for event in trace["traceEvents"] if event["ph"] == "X")
    event.update(change)
    if isinstance(event["args"]["stage"], str):
        event["name"] = f"{event['args']['stage']} {event['args']['batch']}"
    path = tmp_path / "trace-of.json"
    path.write_text(json.dumps(trace))
    assert "trace-of.json" in told(capsys, str(path))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("summary.json", b'{"loss": 0.', "summary.json is not JSON, or was cut off"),
        ("summary.json", b"[]", "is not a summary"),
        ("metrics.jsonl", b'{"step": 1}\n{"st\n{"step": 3}\n', "metrics.jsonl line 2"),
        ("metrics.jsonl", b"7\n", "metrics.jsonl line 1 is not an object"),
        ("recipe.toml", b"\xff", "recipe.toml is not text"),
        ("trace.json", b'{"traceEvents": [', "trace.json is not JSON"),
        ("data.json", b'{"stages": [', "data.json is not JSON"),
        ("data.json", b"[]", "data.json does not describe data"),
    ],
)
def test_runs_with_broken_files(
    name: str, content: bytes, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "run")
    (run / name).write_bytes(content)
    error = told(capsys, str(run))
    assert words in error and "remove" in error
    assert not (run / "report.html").exists()


def test_what_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no" in told(capsys, str(tmp_path / "none"))
    assert "is not a run directory" in told(capsys, str(tmp_path))
    run = a_run(tmp_path / "run")
    assert f"give the directory, {run}" in told(capsys, str(run / "summary.json"))
    assert "--out" in told(capsys, str(run), "--out", str(tmp_path / "no" / "x.html"))
    assert "--out" in told(capsys, str(run), "--out", str(tmp_path))
    assert "made from" in told(capsys, str(run), "--out", str(run / "summary.json"))
    assert "both" in told(capsys, str(run), "--out", "-", "--json", "-")


def shown(path: Path) -> None:
    with contextlib.suppress(ReportError):
        page(read(path))


@pytest.mark.slow
def test_wrong_kinds_of_values_do_not_break_a_page(tmp_path: Path) -> None:
    """Every value of a summary and of a rung replaced by each kind of another: a page or one line, never a traceback."""
    others: list[Any] = [None, True, "x", -1, 1e300, 10**400, [], [1], {}, {"a": {"b": []}}]
    run, path = a_run(tmp_path / "run"), tmp_path / "b.json"
    for other in others:
        for given in (
            *(a_data(**{key: other}) for key in a_data()),
            a_data(stages=[other]),
            a_data(lengths={"mean": other, "histogram": [other]}),
            a_data(lengths={"histogram": [[other, 3], [5, other]]}),
        ):
            (run / "data.json").write_text(json.dumps(given))
            shown(run)
        for key in a_summary():
            (run / "summary.json").write_text(json.dumps(a_summary(**{key: other})))
            shown(run)
        for key in a_bench():
            path.write_text(json.dumps(a_bench(**{key: other})))
            shown(path)
        for key in a_bench()["rungs"][0]:
            bench = a_bench()
            bench["rungs"][0][key] = other
            path.write_text(json.dumps(bench))
            shown(path)
        (run / "summary.json").write_text(json.dumps(a_summary()))
        for key in ("step", "loss", "samples", "seconds", "eval", "auc", "why"):
            line = {"step": 3, "loss": 1.0, "samples": 5, "seconds": 1.0, key: other}
            (run / "metrics.jsonl").write_text(json.dumps(line) + "\n")
            shown(run)


def test_no_name_can_leave_the_data() -> None:
    """What is embedded has no `<` at all, is ASCII, and comes back as it was."""
    text = embedded({BAD: [BAD, "@@SCRIPT@@"]})
    assert "<" not in text and text.isascii() and json.loads(text) == {BAD: [BAD, "@@SCRIPT@@"]}
    html = page({"title": BAD + "@@STYLE@@"})
    assert html.count("<script") == 2 and html.count("</script>") == 2 and html.count("<style") == 1


def test_a_page_asks_nobody() -> None:
    """No address in it, but for the name of the SVG language, and a policy that forbids all requests."""
    html = page({"title": "t"})
    assert html.replace("http://www.w3.org/2000/svg", "").count("://") == 0
    assert "default-src 'none'" in html


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "page.html"
    out.write_text("before")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError):
        write_page(out, "after")
    assert out.read_text() == "before" and [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_neither_torch_nor_numba_is_loaded(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    program = (
        "import sys; from nestpipe.cli.main import main; assert main(sys.argv[1:]) == 0\n"
        "assert not {'torch', 'numba', 'pyarrow'} & set(sys.modules), sorted(sys.modules)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, "report", str(run)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr


def test_a_bench_writes_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`bench --page`: the same page, with the command and the date, which the JSON has too; a bad place is refused first."""
    monkeypatch.setattr(
        "nestpipe.lab.running.run_ladder",
        lambda *_: {k: v for k, v in a_bench().items() if k not in ("date", "command")},
    )
    out, figures = tmp_path / "b.html", tmp_path / "b.json"
    assert main(["bench", "dlrm", "--rounds", "1", "--page", str(out), "--json", str(figures)]) == 0
    assert str(out) in capsys.readouterr().err
    written = json.loads(figures.read_text())
    assert written["command"].startswith("nestpipe bench dlrm --rounds 1 --page") and written["date"]
    assert written["command"] in out.read_text()
    assert main(["report", str(figures), "--out", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text() == out.read_text()
    assert main(["bench", "dlrm", "--page", str(tmp_path / "no" / "b.html")]) == 2
    assert "--page" in capsys.readouterr().err
