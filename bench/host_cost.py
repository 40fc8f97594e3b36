"""What a micro-batch costs the host: CPU of all lanes, by thread clocks, with N = 8 and N = 16 micro-batches in turn.

    python bench/host_cost.py [--recipe timed] [--steps 40] [--rounds 3] [--micro 8 16] [--set KEY=VALUE]

Two workers on loopback, tables in DRAM, the model `timed`, whose dense compute costs no CPU.  The cost of a micro-batch is
the difference in CPU per step, divided by the difference in micro-batches.  gloo's own threads count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", default="timed")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--micro", type=int, nargs=2, default=[8, 16])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key of the recipe")
    return parser.parse_args()


def thread_clocks() -> dict[str, float]:
    """Milliseconds of CPU of every thread of this process, by the name that Python or the kernel gives it."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    clocks: dict[str, float] = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            name = names.get(int(task.name)) or (task / "comm").read_text().strip()
            clocks[name] = clocks.get(name, 0.0) + int((task / "schedstat").read_text().split()[0]) / 1e6
    return clocks


def measure(args: argparse.Namespace) -> None:
    """On every worker: CPU and wall time of a step, for each number of micro-batches in turn."""
    from nestpipe.cli.recipes import read_recipe
    from nestpipe.comm.world import World
    from nestpipe.train.build import make_pipeline, open_source
    from nestpipe.train.streams import train_stream

    world = World.join(timeout=120)
    found: dict[int, list[tuple[float, float, dict[str, float]]]] = {n: [] for n in args.micro}
    for _ in range(args.rounds):
        for micro in args.micro:
            settings = ["pipeline.schedule=nested", f"pipeline.micro_batches={micro}", "tables.disk_path=none"]
            recipe = read_recipe(args.recipe, [*settings, *args.set, f"train.steps={args.steps + 10}"])
            source = open_source(recipe, "train", world)
            pipeline, stream = make_pipeline(recipe, source, world), train_stream(recipe, source, world)
            for _ in range(8):
                pipeline.progress(stream)
            before, cpu, wall = thread_clocks(), time.process_time(), time.perf_counter()
            for _ in range(args.steps):
                pipeline.progress(stream)
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            after = thread_clocks()
            lanes = {name: (ms - before.get(name, 0.0)) / args.steps for name, ms in after.items()}
            found[micro].append((1000 * cpu / args.steps, 1000 * wall / args.steps, lanes))
            pipeline.settle()
            stream.close()
            pipeline.close()
    if world.rank == 0:
        print(json.dumps({str(n): values for n, values in found.items()}))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still run while Python shuts down


def main() -> int:
    args = arguments()
    if "RANK" in os.environ:
        measure(args)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.workers)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run([sys.executable, *launcher, *sys.argv], env=environment, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return 1
    found = {int(n): values for n, values in json.loads(done.stdout.strip().splitlines()[-1]).items()}
    few, many = args.micro
    for n, values in found.items():
        cpus, walls = [v[0] for v in values], [v[1] for v in values]
        print(f"N = {n}: CPU {statistics.median(cpus):.1f} ms a step {[round(c, 1) for c in cpus]}, "
              f"wall {statistics.median(walls):.1f} ms {[round(w, 1) for w in walls]}")  # fmt: skip
    each = [(b[0] - a[0]) / (many - few) for a, b in zip(found[few], found[many])]
    print(f"a micro-batch: {statistics.median(each):.2f} ms of CPU {[round(e, 2) for e in each]}")
    lanes = sorted({name for values in found.values() for v in values for name in v[2]})
    for lane in lanes:
        a, b = (statistics.median(v[2].get(lane, 0.0) for v in found[n]) for n in args.micro)
        if max(a, b) >= 0.3:
            print(f"  {lane:24} {a:6.1f} {b:6.1f}  {(b - a) / (many - few):+.2f} each")
    return 0


if __name__ == "__main__":
    sys.exit(main())
