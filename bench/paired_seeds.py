"""Variants of a recipe, trained over several seeds and compared pair by pair: the same order of samples, the same first
values.

The result of a finished run is kept in a file of its own, and a run that is there is not trained again: a command may be
killed and started again, or given more seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
        2.110, 2.101, 2.093)  # fmt: skip
"""The 97.5 % point of Student's t with 1, 2, ... degrees of freedom."""

Found = dict[str, list[dict[str, Any]]]
"""By variant: the summary of each seed's run."""


def parser(doc: str | None, results: str) -> argparse.ArgumentParser:
    """The arguments that every comparison on MovieLens-100K has."""
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--data", required=True, help="the ratings of MovieLens-100K: u.data, or its folder")
    made.add_argument("--epochs", type=int, default=40)
    made.add_argument("--seeds", type=int, default=5, help=f"seeds 1 to N; at most {len(T_95) + 1}")
    made.add_argument("--workers", type=int, default=2)
    made.add_argument("--results", default=results, help="folder of finished runs")
    made.add_argument("--json", metavar="FILE", help="write all figures here")
    return made


def train_all(
    variants: Mapping[str, Sequence[str]], common: Sequence[str], metrics: Sequence[str], options: argparse.Namespace
) -> Found:
    """Seed by seed, so that whoever stops early has whole pairs.  `variants`: what each sets (`--set`)."""
    if not 1 <= options.seeds <= len(T_95) + 1:
        sys.exit(f"--seeds must be from 1 to {len(T_95) + 1}, not {options.seeds}")
    found: Found = {variant: [] for variant in variants}
    for seed in range(1, options.seeds + 1):
        for variant, settings in variants.items():
            summary = _summary_of(variant, [*common, *settings], seed, options)
            found[variant].append(summary)
            told = "  ".join(f"{name} {summary['metrics'][name]:.4f}" for name in metrics)
            print(f"seed {seed}  {variant:22s} {told}", flush=True)
    return found


def _summary_of(variant: str, settings: list[str], seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Of a run: from its file, or trained now."""
    name = "-".join(variant.replace("->", " ").replace(",", " ").replace("=", "").split())
    kept = Path(options.results) / f"{name}-seed{seed}-epochs{options.epochs}-workers{options.workers}.json"
    settings = [f"data.path={options.data}", f"train.epochs={options.epochs}", "eval.every=none", *settings]
    if kept.is_file():
        before: dict[str, Any] = json.loads(kept.read_text())
        if before["settings"] != settings:
            sys.exit(f"{kept} is a run with other settings: remove it, or give another --results folder")
        return before
    overrides = [part for setting in settings for part in ("--set", setting)]
    nestpipe = str(Path(sys.executable).parent / "nestpipe")
    with tempfile.TemporaryDirectory() as folder:
        summary = Path(folder) / "summary.json"
        command = [nestpipe, "train", "ml-100k-hstu", "--quiet", "--seed", str(seed), "--workers"]
        command += [str(options.workers), "--run", str(Path(folder) / "run"), "--json", str(summary), *overrides]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"seed {seed}, {variant}: {done.stderr.strip()}")
        found: dict[str, Any] = {"settings": settings, "seed": seed, **json.loads(summary.read_text())}
    kept.parent.mkdir(parents=True, exist_ok=True)
    writing = kept.with_suffix(".writing")
    writing.write_text(json.dumps(found, indent=1))
    writing.rename(kept)
    return found


def compare(found: Found, others: Sequence[str], metrics: Sequence[str]) -> dict[str, Any]:
    """Prints and returns the mean of each metric, and the mean difference to each of `others` with its 95 % interval."""
    figures: dict[str, Any] = {}
    for metric in metrics:
        heads = "   ".join(f"{f'minus {other} (95 %)':>24s}" for other in others)
        print(f"\n{metric:22s} {'mean':>8s}   {heads}")
        for variant, runs in found.items():
            values = [run["metrics"][metric] for run in runs]
            cells, told = {}, []
            for other in others:
                pairs = zip(values, found[other])
                mean, half = interval([mine - theirs["metrics"][metric] for mine, theirs in pairs])
                cells[f"minus {other}"] = {"mean": mean, "half": half if math.isfinite(half) else None}
                told.append("-" if variant == other else f"{mean:+.4f} +- {half:.4f}")
            figures.setdefault(variant, {})[metric] = {"seeds": values, "mean": statistics.fmean(values), **cells}
            print(f"{variant:22s} {statistics.fmean(values):8.4f}   " + "   ".join(f"{cell:>24s}" for cell in told))
    return figures


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of the 95 % interval around it; infinite with one seed."""
    mean, count = statistics.fmean(differences), len(differences)
    if count < 2:
        return mean, math.inf
    return mean, T_95[count - 2] * statistics.stdev(differences) / math.sqrt(count)


def write(figures: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        kept = {"epochs": options.epochs, "seeds": options.seeds, "workers": options.workers, "variants": figures}
        Path(options.json).write_text(json.dumps(kept, indent=1))
