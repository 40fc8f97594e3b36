"""Trains long on the disk tier with growing tables, verifies every read, and checks that memory stays flat.

    python bench/soak.py [--minutes 30] [--schedule dbp] [--path DIR]

Compute sleeps (the `timed` model); everything else is real.  Memory is that of worker 0 without its tables and the
ledger of versions, which grow with every new key.  It is sampled about every ten seconds, after the run has trimmed the
heap.  Three figures may be at most 2 % higher in the last third of the time than in the second: the median of resident
memory, its maximum, and the median of malloc's memory in use without the indexes of tables (rows and keys are not in
malloc's heap).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--schedule", default="dbp")
    parser.add_argument("--path", default=tempfile.gettempdir(), help="directory on the disk to use")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nestpipe-soak-", dir=args.path) as folder:
        run = Path(folder) / "run"
        settings = {
            "data.ids": 400_000,
            "data.samples": 10**10,
            "tables.disk_path": folder,
            "tables.dram_rows": 200_000,
            "train.log_every": 25,
            "train.steps": 10**7,
        }
        command = [sys.executable, "-m", "nestpipe", "train", "timed", "--schedule", args.schedule]
        command += ["--check", "staleness", "--quiet", "--run", str(run)]
        command += [f"--set={key}={value}" for key, value in settings.items()]
        process = subprocess.Popen(command)
        try:
            return watch(process, run / "metrics.jsonl", time.monotonic() + 60 * args.minutes)
        finally:
            if process.poll() is None:
                process.terminate()  # not SIGINT, which background jobs of a shell ignore
                process.wait(30)


def watch(process: subprocess.Popen[bytes], metrics: Path, until: float) -> int:
    told = 0
    while time.monotonic() < until:
        time.sleep(2)
        if process.poll() is not None:
            print(f"failed: the run ended early with exit code {process.returncode}")
            return 1
        lines = read(metrics)
        if len(lines) // 20 > told:
            told = len(lines) // 20
            print(in_words(lines[-1]), flush=True)
    lines = read(metrics)
    print(in_words(lines[-1]))
    resident = np.array([own(line) for line in lines])
    used = np.array([(line["memory"]["heap_used_bytes"] - line["memory"]["heap_index_bytes"]) / 1e6 for line in lines])
    print("in use, MB, every 250 steps: " + " ".join(f"{mb:.0f}" for mb in used[::10]))
    print("resident:                    " + " ".join(f"{mb:.0f}" for mb in resident[::10]))
    print(f"{lines[-1]['step']} steps with every read verified and none stale")
    in_use = compare("in use by malloc's account beside indexes, median", used, np.median)
    highest = compare("resident beside tables and ledger, highest", resident, np.max)
    median = compare("resident beside tables and ledger, median", resident, np.median)
    return int(max(in_use, highest, median) > 0.02)


def compare(what: str, series: np.ndarray, of: Callable[[np.ndarray], float]) -> float:
    """How much higher it is in the last third than in the second."""
    middle, last = (float(of(part)) for part in np.array_split(series, 3)[1:])
    print(f"{what}: {middle:.1f} MB in the second third, {last:.1f} in the last ({last / middle - 1:+.1%})")
    return last / middle - 1


def read(metrics: Path) -> list[dict]:
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def own(line: dict) -> float:
    """Resident MB without the tables and the ledger of versions."""
    memory = line["memory"]
    return (memory["resident_bytes"] - memory["table_bytes"] - memory["ledger_bytes"]) / 1e6


def in_words(line: dict) -> str:
    memory = line["memory"]
    return (
        f"step {line['step']:6d}  {memory['rows'] / 1e6:.2f} M rows on worker 0  tables {memory['table_bytes'] / 1e6:.1f} MB  "
        f"all else {own(line):.1f} MB  {line['samples_per_s']:,.0f} samples/s"
    )


if __name__ == "__main__":
    sys.exit(main())
