"""What a run's summary tells of load balance: the share of the step that workers wait for the most loaded one."""

from __future__ import annotations

from typing import Any

from nestpipe.report.files import mapping, number, sequence, text

KINDS = {"planned": "planned %", "measured": "measured %", "fixed": "fixed batch, planned %"}
"""Figures of the summary, and the columns of the table."""
MOST_WORKERS = 64
MODES = {
    "tokens": "batches are filled to a token budget",
    "cost": "histories are dealt to workers by cost",
}


def shape_balance(found: Any) -> dict[str, Any] | None:
    """None where the run balanced nothing.  What the summary lacks, or has as something else, is left out."""
    balance = mapping(found)
    told = {kind: mapping(balance.get(kind)) for kind in KINDS}
    if not any(told.values()):
        return None
    each = {kind: [_percent(value) for value in sequence(one.get("workers"))] for kind, one in told.items()}
    workers = min(MOST_WORKERS, max(len(values) for values in each.values()))
    rows: list[list[Any]] = [["all workers", *(_percent(one.get("share")) for one in told.values())]]
    for worker in range(workers):
        row = [values[worker] if worker < len(values) else None for values in each.values()]
        rows.append([f"worker {worker}", *row])
    return {"says": _says(balance), "table": {"columns": ["", *KINDS.values()], "rows": rows}}


def _says(balance: dict[str, Any]) -> str:
    mode = text(balance.get("mode")) or "?"
    says = "Share of the step that workers wait for the most loaded one, by the costs of their histories and by the time that "
    says += f"they computed. {mode}: {MODES.get(mode, 'balanced')}."
    if (error := number(balance.get("held_out_error"))) is not None:
        says += f" The cost was off by {100 * error:.1f} % on steps that it was not fitted to."
    return says


def _percent(value: Any) -> str | None:
    found = number(value)
    return None if found is None else f"{100 * found:.2f}"
