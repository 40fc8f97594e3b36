"""`nestpipe bench gr`: operators and training steps of generative recommenders, as tables."""

from __future__ import annotations

import argparse
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from nestpipe.lab.gr_workloads import OperatorWorkload, StepWorkload

GR = "gr"
ROUNDS = 4
"""As many as a workload has batches: each is timed once."""
NOT_TAKEN = {"workers": "--workers", "hosts": "--hosts", "workers_per_host": "--workers-per-host"}
NOT_TAKEN |= {"link": "--link", "inside": "--inside", "disk": "--disk", "data": "--data"}


def measure_gr(args: argparse.Namespace) -> dict[str, Any]:
    """Checks what was given, then measures.  The result has `rows` too: all figures flat, for a page."""
    from nestpipe.lab.gr_bench import measure
    from nestpipe.lab.gr_variants import MALLOCS, read_peers
    from nestpipe.train.display import Display

    for name, flag in NOT_TAKEN.items():
        if getattr(args, name) is not None:
            raise ValueError(f"{flag} is not for `nestpipe bench {GR}`, which measures one core and draws its own data")
    rounds = ROUNDS if args.rounds is None else args.rounds
    if rounds < 1:
        raise ValueError(f"--rounds must be at least 1, not {rounds}")
    peers = read_peers(args.peers)
    operators, steps = chosen(args.rungs)
    mallocs = list(MALLOCS) if args.malloc is None else [args.malloc]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM ends the workers as Ctrl-C does
    with Display(GR) as display:
        found = measure(operators, steps, peers, rounds, mallocs, not args.no_plain, display.show)
    title = "generative recommendation: one core, ms of a pass or a step, and shares of the core's measured sgemm"
    return {"title": title, **found, "rows": [flat(row) for row in (*found["operators"], *found["steps"])]}


def chosen(names: list[str]) -> tuple[list[OperatorWorkload], list[StepWorkload]]:
    """The operators and steps of these names; all where there are none.  "operators" and "steps" stand for all of a kind."""
    from nestpipe.lab.gr_workloads import OPERATORS, STEPS

    known = ["operators", "steps", *(workload.name for workload in (*OPERATORS, *STEPS))]
    for name in names:
        if name not in known:
            raise ValueError(f"no rung {name!r} in {GR}; it has {', '.join(repr(each) for each in known)}")
    return (
        [one for one in OPERATORS if not names or "operators" in names or one.name in names],
        [one for one in STEPS if not names or "steps" in names or one.name in names],
    )


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the page: medians, with empty cells where something was not measured."""

    def median(name: str) -> float | None:
        return row[name]["median"] if name in row else None

    quartiles = {"low_ms": row["ms"]["low"], "high_ms": row["ms"]["high"]} if "ms" in row else {}
    memory = row.get("extra_bytes", row.get("peak_bytes", 0)) / 1e6
    return {
        "measured": row["workload"],
        "variant": row["variant"],
        "malloc": row.get("malloc", ""),
        "ms": median("ms"),
        "low_ms": quartiles.get("low_ms"),
        "high_ms": quartiles.get("high_ms"),
        "times_ours": median("times_ours"),
        "GFLOP/s": median("gflops"),
        "jagged_MFU": median("mfu_jagged"),
        "padded_MFU": median("mfu_padded"),
        "page_faults": median("page_faults"),
        "MB": memory,
    }


def tables(result: dict[str, Any]) -> list[Table]:
    """What there is of the two tables."""
    found = []
    if result["operators"]:
        found.append(operators_table(result))
    if result["steps"]:
        found.append(steps_table(result))
    return found


def operators_table(result: dict[str, Any]) -> Table:
    columns = [
        "operator",
        "variant",
        "ms",
        "x ours",
        "GFLOP/s",
        "of sgemm",
        "tokens",
        "extra MB",
        "of padded",
        "kB/token",
    ]
    table = _table(f"operators, forward and backward, one core, malloc tuned, {result['rounds']} rounds", columns)
    for row in result["operators"]:
        timed = ["", "", "", ""]
        if "ms" in row:
            timed = [
                _ms(row["ms"]),
                _ratio(row["times_ours"]),
                f"{row['gflops']['median']:.1f}",
                _share(row["mfu_jagged"]),
            ]
        of_padded = f"{row['memory_of_padded']:.1%}" if "memory_of_padded" in row else ""
        memory = [f"{row['extra_bytes'] / 1e6:,.1f}", of_padded, f"{row['extra_bytes_per_token'] / 1e3:.2f}"]
        table.add_row(row["workload"], row["variant"], *timed, f"{row['tokens']:,}", *memory)
    return table


def steps_table(result: dict[str, Any]) -> Table:
    columns = ["model", "full", "variant", "malloc", "ms/step", "x ours", "jagged MFU", "padded MFU", "sgemm GFLOP/s"]
    table = _table(
        f"training steps, one core, {result['rounds']} rounds; plain: padded torch of the same equations",
        [*columns, "page faults", "peak MB"],
    )
    for row in result["steps"]:
        figures = [_ms(row["ms"]), _ratio(row["times_ours"]), _share(row["mfu_jagged"]), _share(row["mfu_padded"])]
        figures += [f"{row['sgemm_gflops']['median']:.0f}", f"{row['page_faults']['median']:,.0f}"]
        table.add_row(
            row["workload"],
            f"{row['fill']:.0%}",
            row["variant"],
            row["malloc"],
            *figures,
            f"{row['peak_bytes'] / 1e6:,.0f}",
        )
    return table


def _table(title: str, columns: list[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        left = column in ("operator", "model", "variant", "malloc")
        table.add_column(column, justify="left" if left else "right")
    return table


def _ms(spread: dict[str, float]) -> str:
    return "{median:,.0f} ({low:,.0f} - {high:,.0f})".format(**spread)


def _ratio(spread: dict[str, float]) -> str:
    return "{median:.2f} ({low:.2f} - {high:.2f})".format(**spread)


def _share(spread: dict[str, float]) -> str:
    return f"{spread['median']:.1%}"
