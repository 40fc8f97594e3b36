"""What a page shows is what the files say: waits, sums, lines, rungs."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from made_up import a_bench, a_data, a_run, a_summary, a_trace
from nestpipe.report.bench import colour_of, shape_bench
from nestpipe.report.exposed import Ran, stage_sums, waits
from nestpipe.report.read import read
from nestpipe.report.run import table_of_stages
from nestpipe.report.series import charts, thinned
from nestpipe.report.timeline import shape_timeline
from nestpipe.schedule import BUILDERS, LANES
from nestpipe.schedule.view.svg import COLOURS


def test_a_wait_is_divided_among_what_was_waited_for() -> None:
    """The path from the later compute back to the earlier one; where nothing ran it says so."""
    spans = [
        Ran("compute", 0, 0, 0, 10, None),
        Ran("grad", 0, 0, 10, 14, "compute 0.0"),
        Ran("update", 0, -1, 15, 17, "grad 0.0"),
        Ran("retrieve", 2, -1, 0, 16.5, None),
        Ran("compute", 1, 0, 17, 20, "update 0"),
        Ran("compute", 1, 1, 20, 25, "compute 1.0"),
    ]
    found = waits(spans)
    assert [(w.stage, w.batch, w.start, w.stop) for w in found] == [
        ("grad", 0, 10, 14),
        ("between", -1, 14, 15),
        ("update", 0, 15, 17),
    ]
    sums = stage_sums(spans, found)
    assert sum(s["exposed_ms"] for s in sums.values()) == pytest.approx(25 / 1e3 / 2), "exposed adds up to the steps"
    assert sums["retrieve"]["exposed_ms"] == 0 and sums["retrieve"]["hidden_ms"] > 0


def test_a_trace_that_does_not_say_what_was_waited_for() -> None:
    """Older traces: the wait is marked all the same, as unknown; a circle of names ends too."""
    spans = [Ran("compute", 0, 0, 0, 10, None), Ran("compute", 1, 0, 12, 20, None)]
    assert [(w.stage, w.start, w.stop) for w in waits(spans)] == [("unknown", 10, 12)]
    table = table_of_stages(stage_sums([*spans, Ran("grad", 0, 0, 10, 12, None)], waits(spans)), "a trace")
    grad = next(row for row in table["rows"] if row["stage"] == "grad")
    assert grad["exposed"] is None and grad["hidden"] is None and "older" in table["source"]
    circle = [*spans[:1], Ran("grad", 0, 0, 11, 11.5, "embed 0.0"), Ran("embed", 0, 0, 11, 11.5, "grad 0.0")]
    circle.append(Ran("compute", 1, 0, 12, 20, "grad 0.0"))
    assert sum(w.stop - w.start for w in waits(circle)) == pytest.approx(2)


@pytest.mark.parametrize("schedule", BUILDERS)
def test_waits_fill_the_gaps_of_the_compute_lane(schedule: str) -> None:
    """For every schedule: compute and waits together leave no time out and count none twice."""
    shaped = shape_timeline(json.loads(json.dumps(a_trace(schedule))), "t", "")
    for worker in shaped["workers"]:
        lane = next(lane for lane in worker["lanes"] if lane["name"] == "compute")
        ran = sorted(zip(lane["start"] + worker["exposed"]["start"], lane["stop"] + worker["exposed"]["stop"]))
        assert all(one[1] == pytest.approx(other[0], abs=0.2) for one, other in itertools.pairwise(ran))
        assert "unknown" not in {shaped["stages"][stage] for stage in worker["exposed"]["stage"]}


def test_a_timeline_has_every_lane_and_the_colours_of_the_picture() -> None:
    shaped = shape_timeline(a_trace(workers=3), "t", "")
    assert [w["name"] for w in shaped["workers"]] == ["worker 0", "worker 1", "worker 2"]
    lanes = [lane for lane in LANES if lane != "replica"]  # which one group does not have
    assert all([lane["name"] for lane in w["lanes"]] == lanes for w in shaped["workers"])
    assert shaped["colours"] == list(COLOURS) and shaped["steps"] == 12
    assert sum(len(lane["start"]) for w in shaped["workers"] for lane in w["lanes"]) == shaped["spans"]
    assert shaped["begin"] <= shaped["view"][0] < shaped["view"][1] <= shaped["end"]


def test_a_run(tmp_path: Path) -> None:
    data = read(a_run(tmp_path / "run"))
    assert data["kind"] == "run" and data["title"] == "dlrm" and "dlrm" in data["recipe"]
    figures = {figure["name"]: figure["value"] for figure in data["figures"]}
    assert figures["a step"] == 10 and figures["exposed"] == pytest.approx(10) and figures["AUC, held out"] == 0.8
    assert [c["title"] for c in data["charts"]] == ["loss", "throughput", "AUC", "NE"]
    throughput = data["charts"][1]["lines"][0]["points"]
    assert throughput == [(40, 4000), (60, 4000)], "between two lines"
    assert {row["stage"] for row in data["stages"]["rows"]} == {"embed", "compute"}
    assert dict(data["facts"])["MB sent a step, worker 0"] == 0.1


def test_a_run_that_was_stopped(tmp_path: Path) -> None:
    """No summary: the stages come from the trace; half a line at the end is left out and told."""
    run = a_run(tmp_path / "run")
    (run / "summary.json").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 80, "lo')
    data = read(run)
    assert data["title"] == "run" and len(data["notes"]) == 2, "cut off; no summary"
    assert "trace" in data["stages"]["source"] and len(data["stages"]["rows"]) > 5


def test_a_run_without_a_trace_says_so(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    (run / "trace.json").unlink()
    data = read(run)
    assert data["timeline"] is None and "no trace" in data["no_timeline"]


def test_ranking_metrics_make_charts_of_their_own() -> None:
    lines = [{"step": s, "eval": {"hr@10": 0.1 * s, "hr@50": 0.2, "ndcg@10": 0.1, "samples": 5}} for s in (1, 2)]
    found = {chart["title"]: [line["name"] for line in chart["lines"]] for chart in charts(lines)}
    assert found == {"HR, held out": ["HR@10", "HR@50"], "NDCG, held out": ["NDCG@10"]}


def test_a_long_line_keeps_its_peaks() -> None:
    points = [(float(i), 1.0) for i in range(100_000)]
    points[77_777] = (77_777.0, 50.0)
    points[5] = (5.0, -3.0)
    few = thinned(points)
    assert len(few) <= 2000 and {points[77_777], points[5], points[0], points[-1]} <= set(few)


def test_a_bench() -> None:
    data = shape_bench(a_bench(), "b.json")
    assert [rung["name"] for rung in data["rungs"]] == ["serial", "nested N=8", "torchrec"]
    assert (data["rungs"][1]["least"], data["rungs"][1]["median"], data["rungs"][1]["most"]) == (195, 200, 250)
    assert data["limit"] == {"ms": 180.0, "about": False, "rungs": ["compute alone"]}
    assert data["against"] == ["serial"] and dict(data["facts"])["command"] == "nestpipe bench a"
    assert [stage["name"] for stage in data["stages"]] == ["embed", "compute"]
    assert colour_of("embed") != colour_of("grad") and colour_of("nonsense").startswith("#")


def test_a_bench_on_hosts() -> None:
    """Promise: the page tells hosts and what inside them is shaped, and all ways in which bytes between hosts are known."""
    bench = a_bench() | {"hosts": 2, "workers_per_host": 3, "inside": "5gbit"}
    bench["rungs"][1]["between_hosts"] = {"wire": 2e6, "engine": None, "counted": 1.9e6}
    data = shape_bench(bench, "b.json")
    assert dict(data["facts"])["hosts"] == "2, with 3 workers each" and dict(data["facts"])["inside a host"] == "5gbit"
    assert data["rungs"][1]["mb_between"] == {"wire": 2.0, "engine": None, "counted": 1.9}
    assert set(data["rungs"][0]["mb_between"].values()) == {None}


def test_an_older_bench_has_no_limit_date_or_command() -> None:
    """The limit is worked out from the ratios to it, and the file's date stands in."""
    old = {key: value for key, value in a_bench().items() if key not in ("limit", "date", "command")}
    data = shape_bench(old, "b.json", "2026-01-01")
    assert data["limit"]["about"] and data["limit"]["ms"] == pytest.approx(250)
    assert "2026-01-01" in dict(data["facts"])["date"]


def test_clustering_is_a_table() -> None:
    data = shape_bench({"rows": [{"data": "u.data", "micro_batches": 8, "random": 1.5}]}, "c.json")
    assert data["table"] == {"columns": ["data", "micro batches", "random"], "rows": [["u.data", 8.0, 1.5]]}


def test_summaries_of_any_kind_are_shown(tmp_path: Path) -> None:
    """Null for what was not a number, `auto`, no metrics: nothing of that is an error."""
    odd = a_summary(loss=None, metrics={}, micro_batches="auto", micro_batches_chosen=[[0, 2], [70, 8]], stages={})
    data = read(a_run(tmp_path / "run", odd))
    assert dict(data["facts"])["chosen"] == "2 from batch 0, 8 from batch 70"


def test_load_balance_of_a_run(tmp_path: Path) -> None:
    """Who waits, by plan and by clock; without balance there is no section, and what is odd is left out."""
    assert read(a_run(tmp_path / "none"))["balance"] is None
    share = {"share": 0.021, "workers": [0.0, 0.042]}
    told = {"mode": "cost", "planned": {"share": 0.0012, "workers": [0.0, 0.0024]}, "measured": share, "fixed": None}
    balance = read(a_run(tmp_path / "run", a_summary(balance={**told, "held_out_error": 0.0525})))["balance"]
    assert balance["table"]["rows"] == [
        ["all workers", "0.12", "2.10", None], ["worker 0", "0.00", "0.00", None], ["worker 1", "0.24", "4.20", None],
    ]  # fmt: skip
    assert "off by 5.2 %" in balance["says"] or "off by 5.3 %" in balance["says"]
    for number, odd in enumerate(({}, 3, {"planned": 7}, {"planned": {"workers": "x", "share": None}})):
        assert read(a_run(tmp_path / str(number), a_summary(balance=odd)))["kind"] == "run"
    (lines,) = (c["lines"] for c in charts([{"step": 5, "waiting": {"planned": 0.1}}]) if "waiting" in c["title"])
    assert lines == [{"name": "planned", "points": [(5.0, 0.1)]}]


def test_data_that_a_reader_told_of(tmp_path: Path) -> None:
    """data.json of a run: filters, lengths, bars named by the lengths they hold, ties, notes; without it there is none."""
    run = a_run(tmp_path / "run")
    assert read(run)["data"] is None
    (run / "data.json").write_text(json.dumps(a_data()))
    data = read(run)["data"]
    assert [stage["events"] for stage in data["stages"]] == [1_000_209, 999_611, 711_302]
    assert dict(data["lengths"]) == {
        "least": 18, "median": 96.0, "mean": 165.7, "90 %": 400, "99 %": 910, "most": 2314,
    }  # fmt: skip
    names = [bar["name"] for bar in data["histogram"]]
    assert names[:3] == ["up to 5", "6 to 10", "11 to 20"] and names[-1] == "over 500"
    assert sum(bar["users"] for bar in data["histogram"]) == 6034
    told = a_data(ties={"events": 5, "users": 2, "last": 1, "order": "meta"})
    (run / "data.json").write_text(json.dumps(told))
    assert read(run)["data"]["ties"] == told["ties"]
    assert data["ties"] == {"events": 541_000, "users": 6034} and data["notes"] == ["Ratings below 4 count as events."]


def test_data_of_any_kind_is_shown(tmp_path: Path) -> None:
    """What is missing or is something else is left out: nothing of that is an error."""
    run = a_run(tmp_path / "run")
    odd = {"stages": [{"name": 5, "users": "x"}, 7], "lengths": {"mean": None, "histogram": [[1], [2, -1], [3, 4]]}}
    for given in ({}, odd, {"stages": 1, "lengths": [], "ties": {"events": 1}, "notes": [1, "n"]}):
        (run / "data.json").write_text(json.dumps(given))
        data = read(run)["data"]
        assert data["ties"] is None and data["lengths"] == []
        if given is odd:
            assert data["histogram"] == [{"name": "up to 3", "upper": 3, "users": 4}]
            assert data["stages"] == [{"name": "?", "users": None, "items": None, "events": None}] * 2
