"""A run directory as the data of a page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nestpipe.report.balance import shape_balance
from nestpipe.report.data import shape_data
from nestpipe.report.exposed import COMPUTE, UNKNOWN
from nestpipe.report.files import (
    ReportError,
    count,
    file_date,
    mapping,
    number,
    parse_json,
    read_json,
    read_text,
    sequence,
    text,
)
from nestpipe.report.series import charts
from nestpipe.report.timeline import read_timeline, sums_of
from nestpipe.schedule.stages import RENAMED, STAGES

FILES = ("recipe.toml", "metrics.jsonl", "summary.json", "trace.json", "data.json")
REMOVE = "remove it and the page will be made without it, or train again"
NO_TRACE = (
    "No timeline: this run kept no trace. Today's `nestpipe train` writes one (trace.json); "
    "`nestpipe report TRACE.json` shows what `--trace` wrote."
)


def read_run(path: Path) -> dict[str, Any]:
    """Shows what the directory has: a run that was stopped has no summary, one of an older version no trace."""
    there = [name for name in FILES if (path / name).is_file()]
    if not there:
        raise ReportError(
            f"{path} is not a run directory (none of {', '.join(FILES)} is in it): give what `nestpipe train` left"
        )
    recipe = read_text(path / "recipe.toml", REMOVE) if "recipe.toml" in there else None
    summary = read_json(path / "summary.json", REMOVE) if "summary.json" in there else {}
    if not isinstance(summary, dict):
        raise ReportError(f"{path / 'summary.json'} is not a summary: {REMOVE}")
    notes: list[str] = []
    records = _records(path / "metrics.jsonl", notes) if "metrics.jsonl" in there else []
    timeline = read_timeline(path / "trace.json", REMOVE) if "trace.json" in there else None
    data = path / "data.json"
    told = shape_data(read_json(data, REMOVE), str(data), REMOVE) if "data.json" in there else None
    if "summary.json" not in there:
        notes.append("There is no summary: the run was stopped, or is still running.")
        if timeline is not None and len(timeline["workers"]) == 1:
            notes.append("The trace is of worker 0 only, as a stopped run does not collect the others.")
    notes += [why for record in records if (why := text(record.get("why")))]
    stages, source = _stages(summary), "over all steps but the first few"
    if stages is None and timeline is not None:
        stages, source = sums_of(timeline), "worker 0, over the steps of the trace"
    newest = max((path / name for name in there), key=lambda file: file.stat().st_mtime)
    return {
        "kind": "run",
        "title": text(summary.get("recipe")) or path.resolve().name,
        "subtitle": f"run {path.resolve().name}",
        "facts": [("files of", file_date(newest)), *_facts(summary, path)],
        "figures": _figures(summary, records, stages),
        "notes": notes,
        "charts": charts(records),
        "stages": None if stages is None else table_of_stages(stages, source),
        "balance": shape_balance(summary.get("balance")),
        "data": told,
        "timeline": timeline,
        "no_timeline": None if timeline is not None else NO_TRACE,
        "recipe": recipe,
    }


def read_trace_page(trace: Path, timeline: dict[str, Any]) -> dict[str, Any]:
    """A trace on its own."""
    return {
        "kind": "run",
        "title": trace.stem,
        "subtitle": "trace",
        "facts": [
            ("file", str(trace)),
            ("of", file_date(trace)),
            ("workers", len(timeline["workers"])),
            ("steps", timeline["steps"]),
            ("actions", timeline["spans"]),
        ],
        "figures": _figures({}, [], sums_of(timeline)),
        "notes": [],
        "charts": [],
        "stages": table_of_stages(sums_of(timeline), "worker 0, over the steps of the trace"),
        "balance": None,
        "data": None,
        "timeline": timeline,
        "no_timeline": None,
        "recipe": None,
    }


def computes(stage: str) -> bool:
    return stage in STAGES and STAGES[stage].lane == COMPUTE


def table_of_stages(stages: dict[str, dict[str, float]], source: str) -> dict[str, Any]:
    """If the trace does not say what compute waited for, exposed and hidden times of other stages are not known."""
    told = UNKNOWN not in stages
    rows = []
    for stage, ms in stages.items():
        known = told or computes(stage) or stage == UNKNOWN
        row: dict[str, Any] = {"stage": stage, "busy": ms["busy_ms"], "computes": computes(stage)}
        rows.append(row | {kind: ms[f"{kind}_ms"] if known else None for kind in ("hidden", "exposed")})
    source += "" if told else "; this older trace does not say what compute waited for"
    return {"rows": rows, "step_ms": sum(ms["exposed_ms"] for ms in stages.values()), "source": source}


def _stages(summary: dict[str, Any]) -> dict[str, dict[str, float]] | None:
    found = {}
    for stage, ms in mapping(summary.get("stages")).items():
        found[RENAMED.get(stage, stage)] = {
            kind: number(mapping(ms).get(kind)) or 0.0 for kind in ("busy_ms", "hidden_ms", "exposed_ms")
        }
    return found or None


def _records(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    lines = read_text(path, REMOVE).split("\n")
    if lines[-1]:
        notes.append("The last line of metrics.jsonl is truncated and was left out.")
    found = []
    for number_, line in enumerate(lines[:-1], 1):
        if line.strip():
            record = parse_json(line, f"{path} line {number_}", "remove that line, or the file")
            if not isinstance(record, dict):
                raise ReportError(f"{path} line {number_} is not an object: remove that line, or the file")
            found.append(record)
    return found


def _figures(
    summary: dict[str, Any], records: list[dict[str, Any]], stages: dict[str, dict[str, float]] | None
) -> list[dict[str, Any]]:
    """The few numbers at the top of the page."""
    found: list[dict[str, Any]] = []

    def add(name: str, value: float | None, digits: int, unit: str = "", hint: str = "") -> None:
        if value is not None:
            found.append({"name": name, "value": value, "digits": digits, "unit": unit, "hint": hint})

    if stages:
        step = sum(ms["exposed_ms"] for ms in stages.values())
        waits = sum(ms["exposed_ms"] for stage, ms in stages.items() if not computes(stage))
        add("a step", step, 1, "ms")
        add("exposed", 100 * waits / step if step else None, 1, "%", f"{waits:.1f} ms a step in which compute waits")
    share = number(summary.get("compute_share"))
    add("compute busy", 100 * share if share is not None else None, 1, "%", "of a step, on the first worker")
    flops = mapping(summary.get("flops"))
    jagged, padded = number(flops.get("mfu_jagged")), number(flops.get("mfu_padded"))
    if jagged is not None and padded is not None:
        hint = f"tokens and pairs that there are; {100 * padded:.1f} % with padding and masked pairs"
        add("MFU", 100 * jagged, 1, "%", hint + (", which are not computed" if padded > 1 else ""))
    add("throughput", _last(summary, records, "samples_per_s"), 0, "samples/s")
    stale = number(mapping(summary.get("row_reads")).get("stale_share"))
    add("stale", None if stale is None else 100 * stale, 1, "%", "of row reads were one batch stale: inexact by design")
    metrics = mapping(summary.get("metrics")) or next(
        (m for r in reversed(records) if (m := mapping(r.get("eval")))), {}
    )
    ranks = [key for key in metrics if key.endswith("@10")]
    of_actions = [key for key in metrics if key.startswith(("auc/", "gauc/"))]
    for key in ["auc", "ne", *ranks, *of_actions, "loss"] if metrics else []:
        add(f"{key.upper()}, held out", number(metrics.get(key)), 4)
    if not metrics:
        add("loss", _last(summary, records, "loss"), 4, hint="mean of the last steps")
    return found


def _last(summary: dict[str, Any], records: list[dict[str, Any]], key: str) -> float | None:
    """The value in the summary, or in the last line that has it."""
    return next((value for r in (summary, *reversed(records)) if (value := number(r.get(key))) is not None), None)


def _facts(summary: dict[str, Any], path: Path) -> list[tuple[str, Any]]:
    steps = number(summary.get("steps"))
    sent = number(summary.get("bytes_sent"))
    buffers = mapping(summary.get("buffer_bytes"))
    peak, flops = number(buffers.get("peak")), mapping(summary.get("flops"))
    chosen = summary.get("micro_batches_chosen")
    found: list[tuple[str, Any]] = [
        ("schedule", text(summary.get("schedule"))),
        ("not exact, by design", text(summary.get("inexact"))),
        ("workers", count(summary.get("workers"))),
        ("micro-batches", summary.get("micro_batches")),
        ("chosen", _chosen(chosen) if summary.get("micro_batches") == "auto" else None),
        ("steps", count(steps)),
        ("samples", count(summary.get("samples"))),
        ("seconds", _rounded(summary.get("seconds"), 1)),
        ("loss", _rounded(summary.get("loss"), 4)),
        *((f"held out: {key}", _rounded(value, 4)) for key, value in mapping(summary.get("metrics")).items()),
        ("rows on worker 0", count(summary.get("rows"))),
        ("MB sent a step, worker 0", _rounded(sent / steps / 1e6, 2) if sent is not None and steps else None),
        ("buffers, highest MB", _rounded(peak / 1e6, 1) if peak is not None else None),
        ("GFLOPs a step", _rounded((number(flops.get("jagged")) or 0) / 1e9, 2) if flops else None),
        ("peak, GFLOP/s", _rounded((number(flops.get("peak")) or 0) / 1e9, 1) if flops else None),
        ("seed", count(summary.get("seed"))),
        ("digest", text(summary.get("digest"))),
        ("directory", str(path)),
    ]
    return [
        (name, value if isinstance(value, int | float) else str(value)) for name, value in found if value is not None
    ]


def _chosen(chosen: Any) -> str | None:
    pairs = [pair for pair in sequence(chosen) if isinstance(pair, list) and len(pair) == 2]
    return ", ".join(f"{micro} from batch {batch}" for batch, micro in pairs) or None


def _rounded(value: Any, digits: int) -> float | None:
    found = number(value)
    return None if found is None else round(found, digits)
