"""Reads a run directory, a trace or the JSON of a bench, whichever it is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nestpipe.report.bench import shape_bench
from nestpipe.report.files import ReportError, file_date, read_json
from nestpipe.report.run import FILES, read_run, read_trace_page
from nestpipe.report.timeline import shape_timeline

WANTED = "give a run directory, a trace (`train --trace FILE`) or a bench (`bench … --json FILE`)"


def read(path: Path) -> dict[str, Any]:
    """The data of the page."""
    if path.is_dir():
        return read_run(path)
    if not path.exists():
        raise ReportError(f"there is no {path}: {WANTED}")
    found = read_json(path, WANTED)
    if isinstance(found, dict) and "traceEvents" in found:
        return read_trace_page(
            path, shape_timeline(found, str(path), "write it again with `nestpipe train … --trace FILE`")
        )
    if path.name in FILES:
        raise ReportError(f"{path} is one file of a run: give the directory, {path.parent}")
    if not isinstance(found, dict) or not {"rungs", "rows"} & found.keys():
        raise ReportError(f"{path} is neither a trace nor the figures of a bench: {WANTED}")
    return shape_bench(found, str(path), file_date(path))


def default_out(path: Path) -> Path:
    return path / "report.html" if path.is_dir() else path.with_suffix(".html")
