"""Sums up the reports of a ladder: step times of the slowest worker with their spread, and ratios within rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from nestpipe.lab.ladder import MIX_POINTS, Best, Hides, Ladder, Mix, Rung
from nestpipe.schedule.parts import divide
from nestpipe.schedule.timeline import compute_share

StageReport = dict[str, dict[str, float]]
"""Milliseconds per step, by stage and kind: what `Timeline.report` returns."""


def spread(values: Sequence[float]) -> dict[str, float]:
    """The median and the quartiles."""
    low, middle, high = np.percentile(values, [25, 50, 75])
    return {"median": float(middle), "low": float(low), "high": float(high)}


def mean_report(reports: Sequence[StageReport]) -> StageReport:
    """The mean of several reports; a stage that is missing from one took no time there."""
    kinds = {stage: report[stage] for report in reports for stage in report}
    return {
        stage: {kind: sum(report[stage][kind] for report in reports if stage in report) / len(reports) for kind in each}
        for stage, each in kinds.items()
    }


def summarise(ladder: Ladder, rungs: list[Rung], reports: list[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """The result of `nestpipe bench`; `reports` are those of `rungs`."""
    summaries = [_summary(rung, report) for rung, report in zip(rungs, reports)]
    compared = "mean_ms_all" if ladder.whole_turns else "step_ms_all"
    by_name = {summary["name"]: summary[compared] for summary in summaries}
    for summary in summaries:
        summary["ratios"] = {
            name: spread([theirs / ours for theirs, ours in zip(by_name[name], summary[compared])])
            for name in ladder.against
            if name in by_name
        }
    limits = [max(ms) for ms in zip(*(by_name[name] for name in ladder.limit if name in by_name))]
    for summary in summaries if limits else []:
        if summary["peer"] is None:
            summary["of_limit"] = spread([ms / limit for ms, limit in zip(summary[compared], limits)])
    hidden = [_hidden(hides, summaries) for hides in ladder.hides]
    result = {"title": ladder.title, "workers": ladder.workers, "rounds": rounds, "rungs": summaries, "hidden": hidden}
    if limits:
        result["limit"] = {"rungs": ladder.limit, "ms": spread(limits)}
    if ladder.mix is not None:
        others = {s["name"]: s[compared] for s in summaries if s["name"] not in (ladder.mix.rung, *ladder.limit)}
        reached = {
            name: spread([theirs / ours for theirs, ours in zip(by_name[ladder.mix.rung], times)])
            for name, times in others.items()
        }
        result["mix"] = {**_mixed(ladder.mix, summaries), "reached": reached}
    if ladder.best is not None:
        result["best"] = _beside_best(ladder.best, by_name)
    return result


def _beside_best(best: Best, by_name: dict[str, list[float]]) -> dict[str, Any]:
    """Compares a rung that tunes itself with each of the others, and with the fastest by its median round."""
    mine = by_name[best.rung]
    beside = {name: spread([ours / theirs for ours, theirs in zip(mine, by_name[name])]) for name in best.of}
    fastest = min(best.of, key=lambda name: statistics.median(by_name[name]))
    ratio = beside[fastest]
    return {
        **asdict(best),
        "fastest": fastest,
        "ratio": ratio,
        "beside": beside,
        "holds": ratio["median"] <= best.within,
    }


def _mixed(mix: Mix, summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """The shares of the rung's step, and how many times faster it would be if only its compute were left."""
    parts = next(summary for summary in summaries if summary["name"] == mix.rung)["parts"]
    whole = sum(parts.values())
    found = {part: 100 * parts[part] / whole for part in ("lookup", "all2all")}
    found["compute"] = 100 - sum(found.values())
    holds = all(abs(found[part] - getattr(mix, part)) <= MIX_POINTS for part in found)
    return {"wanted": asdict(mix), "found": found, "holds": holds, "ideal": 100 / found["compute"]}


def _parts(ranks: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """What a step is spent on: the mean over workers.

    The slowest worker's time of every stage would count a late lookup twice: as lookup, and as All2All where others
    wait.
    """
    divided = [divide({stage: kinds["exposed_ms"] for stage, kinds in rank.items()}) for rank in ranks]
    return {part: statistics.fmean(rank[part] for rank in divided) for part in divided[0]}


def _hidden(hides: Hides, summaries: list[dict[str, Any]]) -> dict[str, Any]:
    rungs = {summary["name"]: summary for summary in summaries}
    exposed_ms, left_ms = (
        sum(rungs[name]["stages"].get(stage, {}).get("exposed_ms", 0.0) for stage in hides.stages)
        for name in (hides.exposed, hides.hidden)
    )
    slower_ms, still_slower_ms = (
        float(np.median(np.subtract(rungs[name]["step_ms_all"], rungs[without]["step_ms_all"])))
        for name, without in zip((hides.exposed, hides.hidden), hides.without)
    )
    return {
        **asdict(hides),
        "exposed_ms": exposed_ms,
        "still_exposed_ms": left_ms,
        "hidden_share": 1 - left_ms / max(exposed_ms, 1e-9),
        "slower_ms": slower_ms,
        "still_slower_ms": still_slower_ms,
        "hidden_share_of_step": 1 - still_slower_ms / max(slower_ms, 1e-9),
    }


def _between_hosts(report: dict[str, Any], steps: int) -> dict[str, Any]:
    """Bytes from hosts to other hosts in a step, all hosts together, each in its own way; None where it is not known.

    `wire`: measured at the hosts' links.  `engine`: what the workers handed over to be sent.  `counted`: what the keys
    alone say must travel.
    """
    between = report.get("between_bytes")
    counted = report["counted_bytes"]
    engine = report.get("bytes_between_by_rank")
    return {
        "wire": statistics.median(between) / (steps + 1) if between else None,
        "engine": sum(engine) if engine else None,
        "counted": counted["total"] if counted else None,
        "parts": {part: bytes_ for part, bytes_ in counted.items() if part != "total"} if counted else None,
    }


def _summary(rung: Rung, report: dict[str, Any]) -> dict[str, Any]:
    """Per turn, the slowest worker's median step, which a stall of the machine does not move, and its mean step."""
    config = report["config"]
    steps = config["steps"]
    step_ms = [1e3 * max(statistics.median(rank) for rank in turn) for turn in zip(*report["step_s_by_rank"])]
    mean_ms = [1e3 * max(turn) / steps for turn in zip(*report["window_s_by_rank"])]
    cpu_ms = [1e3 * max(turn) / steps for turn in zip(*report["cpu_s_by_rank"])]
    middle = statistics.median(step_ms)
    summary = {
        "name": rung.name,
        "peer": rung.peer,
        "step_ms": middle,
        "step_ms_all": step_ms,
        "mean_ms_all": mean_ms,
        "cpu_ms": statistics.median(cpu_ms),
        "samples_per_s": 1e3 * report["workers"] * config["batch"] / statistics.median(mean_ms),
        "first_losses": report["first_losses"],
    }
    if report.get("wire_bytes"):
        summary["wire_bytes"] = statistics.median(report["wire_bytes"]) / (steps + 1)  # one step of a turn is not timed
    if "counted_bytes" in report:
        summary["between_hosts"] = _between_hosts(report, steps)
    if "stages_by_rank" in report:
        ranks = report["stages_by_rank"]
        summary["stages"] = {
            stage: {kind: max(rank.get(stage, {}).get(kind, 0.0) for rank in ranks) for kind in kinds}
            for stage, kinds in ranks[0].items()
        }
        summary["parts"] = _parts(ranks)
        summary["compute_share"] = statistics.mean(compute_share(rank) for rank in ranks)
        summary["bytes_sent"] = max(report["bytes_sent_by_rank"])
        summary["disk_rows"] = report.get("disk_rows", {})
        summary["micro_batches_chosen"] = report.get("micro_batches_chosen", [])
        summary["buckets"] = report.get("buckets", 1)
    return summary
