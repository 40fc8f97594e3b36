"""`nestpipe bench gr`: operators and training steps of generative recommenders, ours beside plain torch and beside peers.

All variants of an operator or a model are alive at once, on one core, and take turns, so that ratios within a round mean
something.  Each turn also measures the core's sgemm, of which utilisation is a share.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nestpipe.lab.gr_training import check_weights
from nestpipe.lab.gr_variants import OPERATOR_WORKER, STEP_WORKER, RunningVariant, Variant
from nestpipe.lab.gr_workloads import OperatorWorkload, StepWorkload, as_config, save_arrays, save_batches
from nestpipe.lab.ladder import BenchError
from nestpipe.lab.peak_memory import available_bytes
from nestpipe.lab.summary import spread
from nestpipe.launch.signals import signals_held

Tell = Callable[[float, str], None]
MARGIN = 11
"""Places that peers add to the longest history, for the next item and for outputs."""
CLOSE = 1e-4
"""How far losses of variants may be apart, as a share, before training: rounding, not another model."""


def measure(
    operators: Sequence[OperatorWorkload],
    steps: Sequence[StepWorkload],
    peers: dict[str, str],
    rounds: int,
    mallocs: Sequence[str],
    plain: bool,
    tell: Tell,
) -> dict[str, Any]:
    """`operators` and `steps` as lists of rows, one for each variant.  `peers`: checkouts by the kind of model."""
    found: dict[str, Any] = {"rounds": rounds, "operators": [], "steps": []}
    workloads: list[OperatorWorkload | StepWorkload] = [*operators, *steps]
    check_memory(workloads, available_bytes())
    for number, workload in enumerate(workloads):

        def tell_part(done: float, what: str, number: int = number, name: str = workload.name) -> None:
            tell((number + done) / len(workloads), f"{name}: {what}")

        with tempfile.TemporaryDirectory(prefix="nestpipe-bench-") as folder:
            if isinstance(workload, OperatorWorkload):
                found["operators"] += measure_operator(workload, rounds, Path(folder), tell_part)
            else:
                found["steps"] += measure_steps(workload, peers, rounds, mallocs, plain, Path(folder), tell_part)
    return found


def check_memory(workloads: Sequence[OperatorWorkload | StepWorkload], available: int) -> None:
    """BenchError where padded torch would not fit: better now than when the system ends somebody's process."""
    for workload in workloads:
        if workload.padded_bytes > available:
            raise BenchError(
                f"{workload.name} needs about {workload.padded_bytes / 1e9:.0f} GB of memory for padded torch, and "
                f"{available / 1e9:.0f} GB are available: free some, or measure only what fits with --rung"
            )


def measure_operator(workload: OperatorWorkload, rounds: int, folder: Path, tell: Tell) -> list[dict[str, Any]]:
    """Time of ours and of padded torch, and the extra memory of each in a process that does nothing else."""
    names = ("ours", "padded") if workload.timed else ("ours",)
    memory = []
    for name in names:
        tell(0.0, f"memory of {name}")
        (alone,) = _take_turns([Variant(name, "as shipped")], OPERATOR_WORKER, as_config(workload), 0, folder, None)
        memory.append(alone["extra_bytes"])
    rows = [_memory_row(workload, name, extra, memory[-1]) for name, extra in zip(names, memory)]
    if workload.timed:
        variants = [Variant(name, "tuned") for name in names]
        reports = _take_turns(variants, OPERATOR_WORKER, as_config(workload), rounds, folder, tell)
        for row, report in zip(rows, reports):
            flops = [{"jagged": report["flops"]}] * rounds
            row |= _times(report["turns"], reports[0]["turns"], flops)
    return rows


def _memory_row(workload: OperatorWorkload, name: str, extra: int, padded: int) -> dict[str, Any]:
    row = {"workload": workload.name, "variant": name, "tokens": workload.tokens, "extra_bytes": extra}
    if workload.timed:
        row["memory_of_padded"] = extra / max(padded, 1)
    return row | {"extra_bytes_per_token": extra / workload.tokens}


def measure_steps(
    workload: StepWorkload,
    peers: dict[str, str],
    rounds: int,
    mallocs: Sequence[str],
    plain: bool,
    folder: Path,
    tell: Tell,
) -> list[dict[str, Any]]:
    """Steps of ours, of plain torch where `plain`, and of the peer, each with these settings of malloc."""
    data, weights, places = folder / "batches.npz", folder / "weights.npz", workload.max_length + MARGIN
    tell(0.0, "drawing batches")
    save_batches(workload, data)
    save_arrays(weights, check_weights(workload, places))
    shared = {"data": str(data), "weights": str(weights), "places": places}
    kinds: list[tuple[str, str | None]] = [("ours", None), *([("plain", None)] if plain else [])]
    if workload.kind in peers:
        kinds.append((workload.kind, peers[workload.kind]))
    variants = [Variant(name, malloc, checkout) for name, checkout in kinds for malloc in mallocs]
    reports = _take_turns(variants, STEP_WORKER, {**as_config(workload), **shared}, rounds, folder, tell)
    agree(workload, variants, [report["check_loss"] for report in reports])
    flops = [reports[0]["flops"][turn % workload.batches] for turn in range(rounds)]
    rows = []
    for variant, report in zip(variants, reports):
        ours = reports[variants.index(Variant("ours", variant.malloc))]["turns"]
        rows.append(
            {
                "workload": workload.name,
                "variant": "peer" if variant.checkout else variant.name,
                "malloc": variant.malloc,
                "fill": workload.fill,
                **_times(report["turns"], ours, flops),
                "check_loss": report["check_loss"],
                "peak_bytes": report["peak_bytes"],
            }
        )
    return rows


def agree(workload: StepWorkload, variants: Sequence[Variant], losses: Sequence[float]) -> None:
    """BenchError unless all variants have one loss on the same batch, weights and negatives: else they train other models."""
    for variant, loss in zip(variants, losses):
        if not abs(loss - losses[0]) <= CLOSE * abs(losses[0]):
            raise BenchError(
                f"{workload.name}: on the same batch, weights and negatives {variant.title} has the loss {loss:.6g} and "
                f"{variants[0].title} {losses[0]:.6g}: they do not compute the same model"
            )


def _times(turns: list[dict[str, float]], ours: list[dict[str, float]], flops: list[dict[str, int]]) -> dict[str, Any]:
    """Milliseconds, how many times as long as ours in the same round, and utilisation in each convention."""
    seconds = [turn["seconds"] for turn in turns]
    found: dict[str, Any] = {
        "ms": spread([1e3 * s for s in seconds]),
        "ms_all": [1e3 * s for s in seconds],
        "times_ours": spread([s / mine["seconds"] for s, mine in zip(seconds, ours)]),
        "gflops": spread([f["jagged"] / s / 1e9 for f, s in zip(flops, seconds)]),
        "page_faults": spread([turn["faults"] for turn in turns]),
        "sgemm_gflops": spread([turn["peak"] / 1e9 for turn in turns]),
    }
    for convention in flops[0]:
        shares = [f[convention] / turn["seconds"] / turn["peak"] for f, turn in zip(flops, turns)]
        found[f"mfu_{convention}"] = spread(shares)
    return found


def _take_turns(
    variants: Sequence[Variant], worker: str, config: dict[str, Any], rounds: int, folder: Path, tell: Tell | None
) -> list[dict[str, Any]]:
    """Starts all variants, gives each a turn in every round, and returns their reports.  None is left when it ends."""
    with contextlib.ExitStack() as running:
        started: list[RunningVariant] = []
        total = len(variants) * (rounds + 1)
        for variant in variants:
            own = {**config, "variant": variant.name, "turns": rounds}
            with signals_held():  # until somebody would end what was started
                place = folder / str(len(list(folder.iterdir())))
                started.append(RunningVariant(variant, worker, own, place))
                running.callback(started[-1].stop)
        for turn in range(rounds + 1 if rounds else 0):
            for number, one in enumerate(started):
                if tell is not None:
                    what = f"round {turn}/{rounds}, " if turn else "starting "
                    tell((turn * len(variants) + number) / total, what + one.variant.title)
                one.train(turn)
        return [one.report() for one in started]
