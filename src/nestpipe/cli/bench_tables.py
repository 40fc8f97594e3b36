"""What `nestpipe bench` prints of a ladder: tables of its rungs, and a line for each comparison that the ladder asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nestpipe.lab.layout import Layout

if TYPE_CHECKING:
    from rich.table import Table


def best_line(best: dict[str, Any], rungs: list[dict[str, Any]]) -> str:
    """How the rung with automatic micro-batches compares with the best fixed one."""
    chosen = next(rung for rung in rungs if rung["name"] == best["rung"])["micro_batches_chosen"]
    outcome = "within" if best["holds"] else "NOT within"
    return (
        f"{best['rung']!r} chose {chosen[-1][1]} micro-batches from batch {chosen[-1][0]} on and takes "
        f"{_median(best['ratio'])} of the step of {best['fastest']!r}, the fastest given: {outcome} {best['within']:g}"
    )


def mix_line(mix: dict[str, Any]) -> str:
    """What the step of a rung is made of, against what the ladder wants, and the speedup that would be ideal."""
    from nestpipe.lab.ladder import MIX_POINTS

    words = {"lookup": "lookup", "all2all": "All2All", "compute": "compute and the rest"}
    shares = ", ".join(f"{words[p]} {share:.1f} % (wanted {mix['wanted'][p]:g})" for p, share in mix["found"].items())
    reached = ", ".join(
        f"{name!r} reaches {spread['median']:.2f}x, {spread['median'] / mix['ideal']:.0%} of it"
        for name, spread in mix["reached"].items()
    )
    outcome = "within" if mix["holds"] else "NOT within"
    return (
        f"step of {mix['wanted']['rung']!r}: {shares}: {outcome} {MIX_POINTS:g} points.  With nothing but that compute left, "
        f"it would be {mix['ideal']:.2f}x as fast: the ideal.  {reached}"
    )


def steps_table(result: dict[str, Any]) -> Table:
    """Step times, and the speedup over each rung that others are compared with: median and quartiles over rounds."""
    from rich.table import Table

    rungs = result["rungs"]
    link = f" on links of {result['link']}" if result["link"] else ""
    inside = f", inside {result['inside']}" if result.get("inside") else ""
    disk = f", disks {result['disk']}" if result.get("disk") else ""
    where = Layout(result.get("hosts", 1), result.get("workers_per_host", result["workers"])).words()
    title = f"{result['title']}; {where}{link}{inside}{disk}, {result['rounds']} rounds"
    table = Table(title=title, title_justify="left")
    against = list(rungs[0]["ratios"])
    limited = any("of_limit" in rung for rung in rungs)
    wired = any("wire_bytes" in rung for rung in rungs)
    columns = ["rung", "ms/step", "least - most", "CPU ms", "samples/s", *(["MB sent"] if wired else [])]
    shared = any("compute_share" in rung for rung in rungs)
    columns += ["compute busy"] if shared else []
    columns += [*(f"x {name}" for name in against), *(["of the limit"] if limited else [])]
    for column in columns:
        table.add_column(column, justify="left" if column == "rung" else "right")
    for rung in rungs:
        spread = f"{min(rung['step_ms_all']):.1f} - {max(rung['step_ms_all']):.1f}"
        row = [f"{rung['step_ms']:.1f}", spread, f"{rung['cpu_ms']:.1f}", f"{rung['samples_per_s']:,.0f}"]
        if wired:
            row.append(f"{rung['wire_bytes'] / 1e6:.2f}" if "wire_bytes" in rung else "")
        if shared:
            row.append(f"{rung['compute_share']:.1%}" if "compute_share" in rung else "")
        row += [_median(rung["ratios"][name]) for name in against]
        row += [_median(rung["of_limit"]) if "of_limit" in rung else ""] if limited else []
        table.add_row(rung["name"], *row)
    return table


def between_hosts_table(rungs: list[dict[str, Any]]) -> Table:
    """What hosts sent to other hosts, measured at their links and by the engine, beside what the keys alone say."""
    from rich.table import Table

    table = Table(title="MB between hosts per step, all hosts together", title_justify="left")
    parts = next((tuple(p) for rung in rungs if (p := (rung.get("between_hosts") or {}).get("parts"))), ())
    for column in (
        "rung",
        "on the wire",
        "by the engine",
        "counted",
        "wire / counted",
        *(f"{p} counted" for p in parts),
    ):
        table.add_column(column, justify="left" if column == "rung" else "right")
    for rung in rungs:
        found = rung.get("between_hosts") or {}
        megabytes = ["" if (n := found.get(k)) is None else f"{n / 1e6:.2f}" for k in ("wire", "engine", "counted")]
        ratio = f"{found['wire'] / found['counted']:.3f}" if found.get("wire") and found.get("counted") else ""
        of_parts = [f"{found['parts'][p] / 1e6:.2f}" if found.get("parts") else "" for p in parts]
        table.add_row(rung["name"], *megabytes, ratio, *of_parts)
    return table


def _median(spread: dict[str, float]) -> str:
    return "{median:.2f} ({low:.2f} - {high:.2f})".format(**spread)


def hidden_line(hidden: dict[str, Any]) -> str:
    """How much of some stages' exposed time another rung hides, by the stages' times and by step times."""
    stages = " and ".join(hidden["stages"])
    return (
        f"{stages}: {hidden['exposed']!r} exposes {hidden['exposed_ms']:.1f} ms a step, {hidden['hidden']!r} "
        f"{hidden['still_exposed_ms']:.1f}: {hidden['hidden_share']:.1%} hidden. "
        f"Step times: {hidden['slower_ms']:.1f} ms more than "
        f"{hidden['without'][0]!r}, {hidden['still_slower_ms']:.1f} more than {hidden['without'][1]!r}: "
        f"{hidden['hidden_share_of_step']:.1%}"
    )


def stages_table(result: dict[str, Any]) -> Table:
    """Milliseconds of each stage per step on the slowest worker, and how much of it the step waited for."""
    from rich.table import Table

    rungs = [rung for rung in result["rungs"] if "stages" in rung]
    table = Table(title="stages: busy ms per step, and in brackets how much of it was exposed", title_justify="left")
    table.add_column("rung")
    stages = [stage for stage in rungs[0]["stages"] if any(_is_visible(rung, stage) for rung in rungs)]
    for stage in stages:
        table.add_column(stage, justify="right")
    for rung in rungs:
        cells = [rung["stages"].get(stage, {"busy_ms": 0.0, "exposed_ms": 0.0}) for stage in stages]
        table.add_row(rung["name"], *("{busy_ms:.1f} ({exposed_ms:.1f})".format(**cell) for cell in cells))
    return table


def _is_visible(rung: dict[str, Any], stage: str) -> bool:
    return bool(rung["stages"].get(stage, {}).get("busy_ms", 0.0) >= 0.5)
