"""`nestpipe simulate --sweep group`: replica groups of every size, as a table and as a picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestpipe.cli.output import check_writable, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from nestpipe.sim.figures import Settings
    from nestpipe.sim.profile import Profile


def show_groups(
    args: argparse.Namespace, profile: Profile, workers: Sequence[int], settings: Settings, out: Console
) -> int:
    from rich.table import Table

    from nestpipe.sim.group_sweep import AXIS, GROUPED, group_sweep
    from nestpipe.train.display import Display

    if args.group_size is not None:
        raise ValueError("--group-size fixes what --sweep group varies: leave one of them out")
    for name in args.system:
        if name not in GROUPED:
            raise ValueError(f"--system of --sweep {AXIS} must be one of {', '.join(GROUPED)}, not {name!r}")
    systems = args.system or list(GROUPED)
    if args.svg is not None and len(systems) > 1:
        raise ValueError(f"--svg draws one system: add --system {' or '.join(systems)}")
    check_writable(args.svg, "--svg")
    with Display("simulate") as display:
        rows = group_sweep(profile, workers, settings, systems, display.show)
    shown = Table(title=f"{profile.title}: step in ms by the size of replica groups", title_justify="left")
    columns = ("workers", "of a group", "groups", "a worker holds", *systems)
    for column in columns:
        shown.add_column(column, justify="right")
    by = {(row["workers"], row["group_size"], row["system"]): row for row in rows}
    for count, size in dict.fromkeys((row["workers"], row["group_size"]) for row in rows):
        cells = [by[count, size, system] for system in systems]
        steps = [f"{row['step_ms']:,.0f}{' *' if row['best'] else '  '}" for row in cells]
        holds = f"1/{size:,} of the tables, {cells[0]['copies']:,}x"
        shown.add_row(f"{count:,}", f"{size:,}", f"{cells[0]['copies']:,}", holds, *steps)
    out.print(shown)
    out.print("*: the fastest.  Nx: how many times the tables that a worker holds in one group of all workers.")
    if args.svg is not None:
        Path(args.svg).write_text(_picture(rows, systems[0], profile), encoding="utf-8")
    write_json(args.json, {"profile": args.profile, "axis": AXIS, "rows": rows})
    return 0


def _picture(rows: list[dict[str, Any]], system: str, profile: Profile) -> str:
    """A line for every cluster, with a ring around its fastest size; steps of more than twice that are left out."""
    from nestpipe.sim.plot import plot

    lines: dict[str, list[tuple[float, float]]] = {}
    rings: dict[str, tuple[float, float]] = {}
    fastest = {row["workers"]: row["step_ms"] for row in rows if row["best"]}
    for row in rows:
        if row["step_ms"] > 2 * fastest[row["workers"]]:
            continue
        name, point = f"{row['workers']:,} workers", (row["group_size"], row["step_ms"])
        lines.setdefault(name, []).append(point)
        if row["best"]:
            rings[name] = point
    across = "workers of a group (each holds 1/that of the tables); ring: the fastest"
    return plot(lines, f"{system}: {profile.title}", across, "step, ms", rings)
