"""What `nestpipe train` prints when a run is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from nestpipe.device.launches import waits_in_words
from nestpipe.train.summary import staleness_in_words
from nestpipe.train.utilisation import utilisation_in_words


def show_summary(summary: dict[str, Any], metrics: str, page: Path | None) -> None:
    """On standard error; `metrics` are the held-out metrics in words, `page` is the run's report."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    workers = f"{summary['workers']} worker" + "s" * (summary["workers"] > 1)
    console.print(
        f"{summary['recipe']}: {summary['steps']} steps, {summary['samples']:,} samples in {summary['seconds']:.1f} s "
        f"({summary['samples_per_s']:,.0f} samples/s) on {workers}, {summary['rows']:,} rows on the first"
    )
    if "inexact" in summary:
        console.print(f"inexact by design: {summary['inexact']}", highlight=False)
    if "row_reads" in summary:
        console.print(f"inexact by design: {staleness_in_words(summary['row_reads'])} ({summary['schedule']})")
    console.print(_stages(summary), soft_wrap=False)
    console.print(f"the compute lane is busy for {summary['compute_share']:.1%} of a step")
    for line in utilisation_in_words(summary["flops"]) if "flops" in summary else []:
        console.print(line)
    if "balance" in summary:
        console.print(_waiting(summary["balance"]))
    if "device" in summary:
        memory = {when: f"{count / 2**20:,.1f} MB" for when, count in summary["device"]["bytes"].items()}
        console.print(waits_in_words(summary["device"], summary["steps"], summary["step_ms"]))
        console.print(
            f"device memory {memory['now']}, at its peak {memory['peak']}; times above are those at which the host issued work"
        )
    if summary["windows_by_micro"]:
        console.print(
            f"worker 0 deduplicated {summary['windows_by_micro']:,} of {summary['steps']:,} batches per micro-batch, which sends "
            "more rows, because their windows would have exceeded memory.window_limit"
        )
    if any(summary["evicted"].values()):
        console.print(f"{sum(summary['evicted'].values()):,} keys evicted: nestpipe evicted {summary['run']}")
    if "skipped" in summary:
        parts = summary["skipped"]["parts"]
        named = ", ".join(parts[:3]) + " ..." * (len(parts) > 3)
        console.print(
            f"{len(parts)} part{'s' * (len(parts) > 1)} of the training data could not be read, and "
            f"{summary['skipped']['samples']:,} samples an epoch were left out: {named}"
        )
    console.print(f"[bold]{metrics}[/bold]")
    if popular := summary.get("by_popularity"):
        figures = "  ".join(f"{name.upper()} {value:.4f}" for name, value in popular.items() if name != "samples")
        console.print(f"most popular items instead of the model: {figures}")
    if best := summary.get("best_possible"):
        figures = "  ".join(f"{name.upper()} {value:.4f}" for name, value in best.items() if name != "users")
        console.print(f"best possible, over {best['users']:,} users: {figures}")
    console.print(f"run {summary['run']}  digest {summary['digest'][:16]}")
    if page is not None:
        console.print(f"page {page}")


def _waiting(balance: dict[str, Any]) -> str:
    """What workers wait for the most loaded one."""
    names = {"planned": "planned", "measured": "measured", "fixed": "with a fixed batch it would be"}
    told = [f"{name} {balance[kind]['share']:.1%}" for kind, name in names.items() if balance[kind] is not None]
    return f"waiting for the most loaded worker: {', '.join(told) or 'not known after so few steps'} of the step"


def _stages(summary: dict[str, Any]) -> Table:
    """Per stage, what was hidden and what the step waited for; the exposed column adds up to the step."""
    table = Table(box=None, pad_edge=False, title_justify="left", title=f"a step of {summary['step_ms']:.1f} ms")
    table.add_column("stage")
    for column in ("busy ms", "hidden", "exposed", "of step"):
        table.add_column(column, justify="right")
    for stage, ms in summary["stages"].items():
        if ms["busy_ms"] >= 0.05 or ms["exposed_ms"] >= 0.05:
            share = ms["exposed_ms"] / max(summary["step_ms"], 1e-9)
            numbers = [f"{ms[kind]:.1f}" for kind in ("busy_ms", "hidden_ms", "exposed_ms")]
            table.add_row(stage, *numbers, f"{share:.0%}", style="dim" if share < 0.005 else None)
    return table
