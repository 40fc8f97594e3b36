"""What malloc's thresholds are worth: a step on long histories with and without them, in turn.

python bench/malloc.py [--rounds 3] [--steps 60] [--set model.dim=256 ...]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

LONG = {
    "data.max_length": 1024, "model.max_length": 1024, "data.mean_length": 900, "data.users": 400, "data.items": 20_000,
    "data.negatives": 64, "model.dim": 128, "model.heads": 2, "train.batch_size": 8, "train.log_every": 1,
    "eval.max_samples": 1,
}  # fmt: skip
"""The recipe hstu with histories of up to 1,024 items."""
USERS = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "NESTPIPE_MALLOC")


def measure(mode: str, steps: int, changes: list[str]) -> dict[str, float]:
    """One run in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(USERS)}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "summary.json"
        keys = [f"{key}={value}" for key, value in LONG.items()] + [f"train.steps={steps}", *changes]
        command = [sys.executable, "-m", "nestpipe", "train", "hstu", "--workers", "1", "--quiet", "--json", str(place)]
        command += ["--run", f"{folder}/run", *(part for key in keys for part in ("--set", key))]
        process = subprocess.Popen(
            command, env={**clean, "NESTPIPE_MALLOC": mode}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, used = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"{' '.join(command)} failed")
        step = json.loads(place.read_text())["step_ms"]
    cpu = used.ru_utime + used.ru_stime
    return {"step ms": step, "faults": used.ru_minflt, "CPU s": cpu, "peak MB": used.ru_maxrss / 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--set", action="append", default=[], help="key=value of the recipe")
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"default": [], "reuse": []}
    for number in range(args.rounds):
        for mode, runs in found.items():
            runs.append(measure(mode, args.steps, args.set))
            print(
                f"round {number + 1}  {mode:8}",
                *(f"{name} {value:,.0f}" for name, value in runs[-1].items()),
                flush=True,
            )
    for name in found["default"][0]:
        medians = {mode: statistics.median(run[name] for run in runs) for mode, runs in found.items()}
        ratio = medians["default"] / medians["reuse"]
        print(f"{name:8} default {medians['default']:,.0f}  reuse {medians['reuse']:,.0f}  ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
