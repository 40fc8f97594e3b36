"""What sharing is worth: HSTU on MovieLens-100K with 64 negatives shared to 128, beside 64 and 128 that are drawn.

    python bench/sharing.py --data u.data [--epochs 40] [--seeds 5] [--workers 2] [--results sharing-runs] [--json FILE]

Every seed trains all variants, so that differences are paired: the same order of samples, the same first values.  The
result of a finished run is kept in a file of its own, and a run that is there is not trained again: the command may be
killed and started again, or given more seeds.  Printed: the mean of each metric over seeds, and the mean difference to
128 drawn negatives and to 64, with a 95 % interval by Student's t over seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

VARIANTS = {
    "64": ["data.negatives=64"],
    "64 -> 128 logits": ["data.negatives=64", "model.sharing=logits", "model.sharing_factor=2"],
    "64 -> 128 negatives": ["data.negatives=64", "model.sharing=negatives", "model.sharing_factor=2"],
    "128": ["data.negatives=128"],
}
METRICS = ("hr@10", "ndcg@10")
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
        2.110, 2.101, 2.093)  # fmt: skip
"""The 97.5 % point of Student's t with 1, 2, ... degrees of freedom."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", required=True, help="the ratings of MovieLens-100K: u.data, or its folder")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5, help="seeds 1 to N; at most 20")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", default="sharing-runs", help="folder of finished runs")
    parser.add_argument("--json", metavar="FILE", help="write all figures here")
    options = parser.parse_args()
    if not 1 <= options.seeds <= len(T_95) + 1:
        parser.error(f"--seeds must be from 1 to {len(T_95) + 1}")
    return options


def metrics_of(variant: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Of a run: from its file, or trained now."""
    kept = Path(options.results) / (
        f"{variant.replace(' -> ', '-').replace(' ', '-')}-seed{seed}-epochs{options.epochs}-workers{options.workers}.json"
    )
    if not kept.is_file():
        settings = [
            f"data.path={options.data}",
            f"train.epochs={options.epochs}",
            "eval.every=none",
            *VARIANTS[variant],
        ]
        overrides = [part for setting in settings for part in ("--set", setting)]
        nestpipe = str(Path(sys.executable).parent / "nestpipe")
        with tempfile.TemporaryDirectory() as folder:
            summary = Path(folder) / "summary.json"
            command = [nestpipe, "train", "ml-100k-hstu", "--quiet", "--seed", str(seed), "--workers"]
            command += [str(options.workers), "--run", str(Path(folder) / "run"), "--json", str(summary), *overrides]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"seed {seed}, {variant}: {done.stderr.strip()}")
            found = json.loads(summary.read_text())
        kept.parent.mkdir(parents=True, exist_ok=True)
        writing = kept.with_suffix(".writing")
        writing.write_text(json.dumps({"settings": settings, "seed": seed, "metrics": found["metrics"]}, indent=1))
        writing.rename(kept)
    metrics = json.loads(kept.read_text())["metrics"]
    told = "  ".join(f"{name} {metrics[name]:.4f}" for name in METRICS)
    print(f"seed {seed}  {variant:20s} {told}", flush=True)
    return metrics


def interval(differences: list[float]) -> tuple[float, float]:
    """Mean, and half of the 95 % interval around it; infinite with one seed."""
    mean, count = statistics.fmean(differences), len(differences)
    if count < 2:
        return mean, math.inf
    return mean, T_95[count - 2] * statistics.stdev(differences) / math.sqrt(count)


def compare(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for metric in METRICS:
        print(f"\n{metric:22s} {'mean':>8s}   {'minus 128 (95 %)':>24s}   {'minus 64 (95 %)':>24s}")
        for variant, runs in found.items():
            values = [run[metric] for run in runs]
            cells, told = {}, []
            for other in ("128", "64"):
                mean, half = interval([mine - theirs[metric] for mine, theirs in zip(values, found[other])])
                cells[f"minus {other}"] = {"mean": mean, "half": half if math.isfinite(half) else None}
                told.append("-" if variant == other else f"{mean:+.4f} +- {half:.4f}")
            figures.setdefault(variant, {})[metric] = {"seeds": values, "mean": statistics.fmean(values), **cells}
            print(f"{variant:22s} {statistics.fmean(values):8.4f}   {told[0]:>24s}   {told[1]:>24s}")
    return figures


def main() -> None:
    options = arguments()
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in VARIANTS}
    for seed in range(1, options.seeds + 1):
        for variant in VARIANTS:
            found[variant].append(metrics_of(variant, seed, options))
    figures = compare(found)
    if options.json:
        kept = {"epochs": options.epochs, "seeds": options.seeds, "workers": options.workers, "variants": figures}
        Path(options.json).write_text(json.dumps(kept, indent=1))


if __name__ == "__main__":
    main()
