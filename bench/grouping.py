"""Groups a synthetic log of events, beside DuckDB's own GROUP BY ... ORDER BY, in one run; then kills it and runs it again.

    python bench/grouping.py [--events 50000000] [--files 200] [--users 400000] [--memory-gb 1.5] [--rounds 3] [--folder DIR]

Each try is a process of its own, in turns; its time, its CPU and the most memory that it had resident are printed.  At
the end one is killed with SIGKILL in the middle and run again: its files must be the same, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

OURS = """
import sys
from nestpipe.data.interactions.data import InteractionsData
data = InteractionsData(sys.argv[1], cache=sys.argv[2], memory_gb=float(sys.argv[3]))
data.prepare(lambda done, what: sys.stderr.write(f"{done:.3f} {what}\\n"))
"""
THEIRS = """
import sys, duckdb
from pathlib import Path
log, out, memory = sys.argv[1:]
Path(out, "spill").mkdir(parents=True)
connection = duckdb.connect()
connection.execute(f"SET memory_limit = '{memory}GB'; SET temp_directory = '{out}/spill'")
connection.execute("SET preserve_insertion_order = false")
connection.execute(f'''COPY (
    SELECT user_id, list(item_id ORDER BY timestamp) AS item, list(timestamp ORDER BY timestamp) AS time
    FROM read_parquet('{log}/*.parquet') GROUP BY user_id
) TO '{out}/out.parquet' ''')
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--events", type=int, default=50_000_000)
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--users", type=int, default=400_000)
    parser.add_argument("--memory-gb", type=float, default=1.5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where to make log and results; default: a temporary folder")
    parser.add_argument("--json", metavar="FILE", help="write all figures here")
    return parser.parse_args()


def write_log(folder: Path, events: int, files: int, users: int) -> None:
    """Users with log-normal activity, items by a power law, times in no order."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    activity = np.cumsum(draw.lognormal(0, 1.2, users))
    for number in range(files):
        count = events // files
        user = np.searchsorted(activity / activity[-1], draw.random(count)).clip(0, users - 1)
        columns = {
            "user_id": user.astype(np.int64) * 7919 + 13,
            "item_id": (2_000_000.0 ** draw.random(count)).astype(np.int64),
            "timestamp": draw.integers(1_640_000_000, 1_660_000_000, count),
        }
        pq.write_table(pa.table(columns), folder / f"part-{number:05d}.parquet")


def one_try(script: str, log: Path, out: Path, memory: float, kill_at: float | None = None) -> dict[str, Any]:
    """Runs a script; if `kill_at` is given, until its progress is there."""
    command = [sys.executable, "-c", script, str(log), str(out), str(memory)]
    began = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        first = line.split(" ", 1)[0]
        if kill_at is not None and first.replace(".", "", 1).isdigit() and float(first) >= kill_at:
            process.send_signal(signal.SIGKILL)
            break
    process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "resident_gb": round(used.ru_maxrss / 1e6, 2),
        "exit": process.returncode,
    }


def contents(cache: Path) -> dict[str, bytes]:
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory(prefix="nestpipe-grouping-", dir=args.folder) as name:
        folder = Path(name)
        print(f"writing {args.events:,} events in {args.files} files ...", flush=True)
        write_log(folder / "log", args.events, args.files, args.users)
        found: dict[str, list[dict[str, Any]]] = {"nestpipe": [], "duckdb GROUP BY": []}
        for number in range(args.rounds):
            for who, script in (("nestpipe", OURS), ("duckdb GROUP BY", THEIRS)):
                done = one_try(script, folder / "log", folder / f"{who[:4]}{number}", args.memory_gb)
                found[who].append(done)
                print(f"round {number + 1}  {who:16} {done}", flush=True)
        ours, theirs = ([one["seconds"] for one in tries] for tries in found.values())
        ratios = [round(a / b, 3) for a, b in zip(ours, theirs)]
        rate = args.events / statistics.median(ours) / 1e6
        print(f"{rate:.2f} million events a second; nestpipe / duckdb within rounds: {ratios}")
        killed = one_try(OURS, folder / "log", folder / "killed", args.memory_gb, kill_at=0.35)
        again = one_try(OURS, folder / "log", folder / "killed", args.memory_gb)
        same = contents(folder / "killed") == contents(folder / "nest0")
        print(f"killed after {killed['seconds']} s (exit {killed['exit']}), run again in {again['seconds']} s: "
              f"{'the same files, byte for byte' if same else 'OTHER FILES'}")  # fmt: skip
        if args.json:
            figures = {**found, "ratios": ratios, "killed": killed, "again": again, "same": same}
            Path(args.json).write_text(json.dumps(figures, indent=1))
    failed = any(one["exit"] for tries in found.values() for one in tries)
    return 1 if failed or not same else 0


if __name__ == "__main__":
    sys.exit(main())
