"""`nestpipe simulate`: the schedules on a cluster of any size, by a cost model."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestpipe.cli.output import check_writable, console, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from nestpipe.sim.figures import Settings
    from nestpipe.sim.profile import Profile
    from nestpipe.sim.published import Comparison

DESCRIPTION = """\
Runs the action lists of the schedules on a virtual clock: step time, exposed lookup and All2All, speedup and scaling on clusters
of any size.  A profile says what everything costs.  Without arguments: the published cluster, beside every published figure.
"""
EPILOG = """\
examples:
  nestpipe simulate                                       1,536 workers, and how far off each published figure is
  nestpipe simulate --workers 128,1536,10240              several sizes
  nestpipe simulate --sweep micro --svg micro.svg         one thing varied: workers, micro, batch, link or skew
  nestpipe simulate --sweep group                         replica groups of every size on 128 to 10,240 workers
  nestpipe simulate --sweep group --system nestpipe+hsp --sharing 0.7 --svg hsp.svg
  nestpipe simulate --system nestpipe --micro 16 --skew 0.5 --topology hierarchical:8
  nestpipe simulate --calibrate lab.toml                  measure this machine (root, some minutes) and write a profile
  nestpipe simulate --profile lab.toml --workers 2,3,4 --link-speed 0.5
"""


def add(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate", help="simulate step times on clusters of any size", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument(
        "--profile", default="paper-npu", metavar="P", help="paper-npu, lab, or a file; default: paper-npu"
    )
    parser.add_argument("--workers", metavar="N,...", help="cluster sizes; default: the profile's, or 1536")
    parser.add_argument("--system", action="append", default=[], metavar="S", help="only this system; repeatable")
    parser.add_argument("--micro", type=int, metavar="N", help="micro-batches of systems that have them")
    parser.add_argument("--batch", type=int, metavar="B", help="samples in a worker's batch")
    parser.add_argument(
        "--link-speed", type=float, default=1.0, metavar="X", help="a multiple of the profile's; default: 1"
    )
    parser.add_argument(
        "--skew", type=float, default=0.0, metavar="X", help="load of the busiest owner above the mean; default: 0"
    )
    parser.add_argument(
        "--jitter", type=float, metavar="X", help="spread of compute over workers, as a share; default: the profile's"
    )
    parser.add_argument(
        "--sharing",
        type=float,
        metavar="X",
        help="n workers touch n ** X times the rows of one: 1, no two share a row; default: the profile's",
    )
    parser.add_argument("--topology", default="full-mesh", metavar="T", help="full-mesh, groups:G or hierarchical:K")
    parser.add_argument(
        "--group-size",
        type=int,
        metavar="I",
        help="workers of a replica group; default: the profile's number of groups",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=50,
        metavar="N",
        help="steps to simulate; the first 10 are not counted; default: 50",
    )
    parser.add_argument("--sweep", metavar="AXIS", help="vary workers, micro, batch, link, skew or group")
    parser.add_argument("--svg", metavar="FILE", help="with --sweep: draw it here")
    parser.add_argument("--calibrate", metavar="FILE", help="measure this machine and write its profile here")
    parser.add_argument("--json", metavar="FILE", help="write all figures here ('-': standard output)")
    parser.set_defaults(command=run)


def run(args: argparse.Namespace, arguments: list[str]) -> int:
    from nestpipe.sim import group_sweep
    from nestpipe.sim.figures import Settings
    from nestpipe.sim.profile import load_profile

    check_writable(args.json)
    if args.calibrate is not None:
        return _calibrate(args)
    if args.svg is not None and args.sweep is None:
        raise ValueError("--svg draws a sweep: add --sweep workers, micro, batch, link, skew or group")
    profile = load_profile(args.profile)
    if args.jitter is not None:
        profile = replace(profile, jitter=args.jitter)
    if args.sharing is not None:
        profile = replace(profile, network=replace(profile.network, sharing=args.sharing))
    settings = Settings(args.micro, args.batch, args.link_speed, args.skew, args.topology, args.steps, args.group_size)
    out = console(args.json)
    if args.sweep == group_sweep.AXIS:
        from nestpipe.cli.simulate_groups import show_groups

        sizes = group_sweep.WORKERS if args.workers is None else _workers(args.workers, profile)
        return show_groups(args, profile, sizes, settings, out)
    workers = _workers(args.workers, profile)
    show = _sweep if args.sweep else _table
    return show(args, profile, workers, settings, out)


def _table(args: argparse.Namespace, profile: Profile, workers: list[int], settings: Settings, out: Console) -> int:
    from rich.table import Table

    from nestpipe.sim import published
    from nestpipe.sim.figures import Settings, table
    from nestpipe.sim.systems import exact

    names = _systems(args.system)
    begin = time.perf_counter()
    rows = table(profile, workers, names, settings)
    took = time.perf_counter() - begin
    shown = Table(title=f"{profile.title}; {settings.steps} steps simulated in {took:.1f} s", title_justify="left")
    columns = (
        "workers",
        "system",
        "N",
        "step ms",
        "lookup ms",
        "All2All ms",
        "speedup",
        "samples/s",
        "scaling",
        "exact",
    )
    for column in columns:
        shown.add_column(column, justify="left" if column in ("system", "exact") else "right")
    for row in rows:
        shown.add_row(
            f"{row['workers']:,}",
            row["system"],
            str(row["micro_batches"]),
            f"{row['step_ms']:,.1f}",
            f"{row['lookup_ms']:,.1f}",
            f"{row['exposed_comm_ms']:,.1f}",
            f"{row['speedup']:.2f}x",
            f"{row['qps']:,.0f}",
            f"{row['scaling_efficiency']:.1%}",
            exact(row["system"]),
        )
    out.print(shown)
    out.print(
        f"lookup, All2All: the part that the step waited for.  scaling: against {profile.reference_workers} workers, "
        "the batch of each worker the same.  exact: what `check` says of the schedule."
    )
    result: dict[str, Any] = {"profile": args.profile, "rows": rows, "seconds": took}
    code = 0
    if args.profile == published.PROFILE and settings == Settings() and args.jitter is None and args.sharing is None:
        found = published.compare(profile)
        _print_comparison(out, found, profile)
        result["published"] = [{**vars(one), "error": one.error, "holds": one.holds} for one in found]
        code = 0 if all(one.holds for one in found) else 1
    for line in profile.assumptions:
        out.print(f"assumed: {line}", style="dim", soft_wrap=True, highlight=False)
    write_json(args.json, result)
    return code


def _print_comparison(out: Console, found: Sequence[Comparison], profile: Profile) -> None:
    from rich.table import Table

    from nestpipe.sim.published import PERCENT, POINTS

    title = f"{len(found)} published figures (1,536 workers where none are named), {len(profile.fitted)} fitted numbers"
    shown = Table(title=title, title_justify="left")
    for column in ("figure", "published", "simulated", "error", f"within {PERCENT:g} % or {POINTS:g} points"):
        shown.add_column(column, justify="left" if column == "figure" else "right")
    for one in found:
        outcome = "not promised" if not one.promised else "yes" if one.holds else "NO"
        unit = " points" if one.unit == "%" else " %"
        shown.add_row(
            one.what,
            f"{one.published:,.2f} {one.unit}",
            f"{one.simulated:,.2f} {one.unit}",
            f"{one.error:+.1f}{unit}",
            outcome,
        )
    out.print(shown)


def _sweep(args: argparse.Namespace, profile: Profile, workers: list[int], settings: Settings, out: Console) -> int:
    from rich.table import Table

    from nestpipe.sim import group_sweep
    from nestpipe.sim.plot import plot
    from nestpipe.sim.sweep import AXES, sweep
    from nestpipe.train.display import Display

    if args.sweep not in AXES:
        raise ValueError(f"--sweep must be one of {', '.join(AXES)}, {group_sweep.AXIS}, not {args.sweep!r}")
    check_writable(args.svg, "--svg")
    if args.sweep != "workers" and len(workers) > 1:
        raise ValueError(f"--sweep {args.sweep} takes one number of workers, not {len(workers)}")
    axis = AXES[args.sweep]
    with Display("simulate") as display:
        rows = sweep(args.sweep, profile, workers[0], settings, display.show)
    names = [name for name in axis.systems if name in _systems(args.system)]
    what, up = ("speedup", "times faster than torchrec") if axis.speedup else ("step_ms", "step, ms")
    where = "" if args.sweep == "workers" else f", {workers[0]:,} workers"
    shown = Table(title=f"{profile.title}{where}: {up}", title_justify="left")
    shown.add_column(axis.title, justify="right")
    for name in names:
        shown.add_column(name, justify="right")
    by = {(row["value"], row["system"]): row for row in rows}
    for value in axis.values:
        cells = [f"{by[value, name][what]:,.2f}" if axis.speedup else f"{by[value, name][what]:,.0f}" for name in names]
        shown.add_row(f"{value:,g}", *cells)
    out.print(shown)
    if args.svg is not None:
        lines = {name: [(value, by[value, name][what]) for value in axis.values] for name in names}
        Path(args.svg).write_text(plot(lines, f"{profile.title}{where}", axis.title, up), encoding="utf-8")
    write_json(args.json, {"profile": args.profile, "axis": args.sweep, "rows": rows})
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    from nestpipe.lab.calibrate import calibrate, to_toml
    from nestpipe.train.display import Display

    if not args.calibrate.endswith(".toml") or not Path(args.calibrate).absolute().parent.is_dir():
        raise ValueError(f"--calibrate {args.calibrate}: the file must end in .toml, in a folder that exists")
    with Display("calibrate") as display:
        values, measured = calibrate(display.show)
    Path(args.calibrate).write_text(to_toml(values), encoding="utf-8")
    console(args.json).print(
        f"{args.calibrate}: use it with `nestpipe simulate --profile {args.calibrate}`", highlight=False, soft_wrap=True
    )
    write_json(args.json, {"profile": values, "measured": measured})
    return 0


def _workers(text: str | None, profile: Profile) -> list[int]:
    if text is None:
        return [profile.workers]
    found = []
    for part in text.split(","):
        if not (part.strip().isascii() and part.strip().isdigit() and 1 <= int(part.strip()[:9]) <= 1_000_000):
            raise ValueError(f"--workers must be numbers from 1 to 1000000, separated by commas, not {text!r}")
        found.append(int(part))
    return found


def _systems(names: list[str]) -> list[str]:
    from nestpipe.sim.systems import SYSTEMS

    for name in names:
        if name not in SYSTEMS:
            raise ValueError(f"--system must be one of {', '.join(SYSTEMS)}, not {name!r}")
    return names or list(SYSTEMS)
