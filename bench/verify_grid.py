"""`nestpipe verify` over a grid: models x optimizers x workers x DRAM or disk, each 200 steps against serial, bit for bit.

    python bench/verify_grid.py [--schedule dbp] [--steps 200] [--workers 1 2 3 4] [--micro 1]

Models and batches are small, so that a run is mostly schedule; tables go to disk with room for a few rows in DRAM.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODELS = {
    "dlrm": ["data.features=4", "data.hot=[1,1,2,3]", "data.ids=300", "model.dim=8", "model.bottom=[8]", "model.top=[8]"],
    "hstu": ["data.users=400", "data.items=300", "data.max_length=12", "data.mean_length=6.0", "data.negatives=4",
             "model.dim=8", "model.max_length=12", "train.epochs=none"],
}  # fmt: skip
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--schedule", default="dbp")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--micro", type=int, nargs="+", default=[1])
    args = parser.parse_args()
    grid = list(itertools.product(args.workers, MODELS, OPTIMIZERS, ("dram", "disk"), args.micro))
    different, started = 0, time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="nestpipe-grid-") as folder:
        for number, (workers, model, optimizer, tier, micro) in enumerate(grid, start=1):
            out = Path(folder) / "result.json"
            settings = [*MODELS[model], f"tables.optimizer={optimizer}", "train.batch_size=16", "train.epochs=none"]
            settings += [f"pipeline.micro_batches={micro}", "tables.lr=0.02"]
            if tier == "disk":
                settings += [f"tables.disk_path={folder}", "tables.dram_rows=40"]
            command = [sys.executable, "-m", "nestpipe", "verify", model, "--quiet", "--json", str(out)]
            command += ["--schedule", args.schedule, "--workers", str(workers), "--steps", str(args.steps)]
            done = subprocess.run([*command, *(f"--set={s}" for s in settings)], capture_output=True, text=True)
            if done.returncode not in (0, 1) or not out.is_file():
                print(done.stderr, file=sys.stderr)
                return 2
            result = json.loads(out.read_text())
            out.unlink()
            different += not result["equal"]
            verdict = "equal" if result["equal"] else result["first_difference"]["text"]
            rows = result["compared"]["rows"]
            left = (time.perf_counter() - started) / number * (len(grid) - number)
            print(f"{workers} workers  {model:5} {optimizer:16} {tier:5} N={micro}  {result['steps']} steps  {rows:6} rows  "
                  f"{verdict}  ({left:.0f} s left)", flush=True)  # fmt: skip
    print(f"{len(grid) - different} of {len(grid)} equal, bit for bit")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
