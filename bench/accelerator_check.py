"""What the first person with an accelerator runs: exactness, sanitizer, kernels, speed; and a file to send back.

    make accelerator-check DEVICE=cuda       or: python bench/accelerator_check.py --device cuda [--workers 1 2] [--quick]

No figure of this has been made on hardware: so far it has run on the simulated device only (--device sim).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SANITIZERS = {"cuda": {"TORCH_CUDA_SANITIZER": "1"}, "npu": {"TORCH_NPU_SANITIZER": "1"}}
SPEED = ["train.batch_size=2048", "data.ids=100000", "model.dim=64", "train.log_every=1000", "eval.max_samples=2048"]
"""Of the runs that are timed; on the simulated device, which is thousands of times slower, small ones."""
TINY = ["train.batch_size=32", "data.ids=200", "model.dim=8", "eval.max_samples=64"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="cuda, npu, auto, or sim")
    parser.add_argument(
        "--workers", type=int, nargs="+", help="default: 1, and all devices of this machine (sim: 1 and 2)"
    )
    parser.add_argument("--quick", action="store_true", help="a small part of the grid, to see that all of it runs")
    parser.add_argument("--json", default="accelerator-check.json", help="what to send back; default: %(default)s")
    return parser.parse_args()


def facts(device: str) -> dict[str, Any]:
    """What the figures depend on."""
    import torch

    from nestpipe.version import VERSION

    module = torch.get_device_module(device)
    name = getattr(module, "get_device_name", lambda: "simulated")()
    triton = importlib.util.find_spec("triton")
    return {
        "nestpipe": VERSION,
        "torch": torch.__version__,
        "device": device,
        "name": name,
        "devices": module.device_count(),
        "triton": triton is not None,
        "python": platform.python_version(),
        "machine": platform.platform(),
    }


def call(name: str, command: list[str], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """Runs one part, shows its last lines, and keeps them."""
    print(f"\n== {name}\n   {' '.join(command[1:])}", flush=True)
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, env={**os.environ, **(environment or {})})
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    print("\n".join(f"   {line}" for line in lines[-6:]), flush=True)
    seconds = time.perf_counter() - began
    print(f"   {'ok' if done.returncode == 0 else 'FAILED'} after {seconds:.0f} s", flush=True)
    return {"ok": done.returncode == 0, "seconds": round(seconds, 1), "output": lines[-400:]}


def grid(device: str, workers: list[int], quick: bool) -> list[str]:
    command = [sys.executable, "bench/verify_grid.py", "--device", device, "--workers", *map(str, workers)]
    if quick:
        small = ["--schedule", "nested", "--micro", "3", "--optimizers", "adagrad", "--tiers", "dram", "--orders", "1"]
        return [*command, *small, "--steps", "4"]
    wide = [
        "--schedule",
        "dbp",
        "fwp",
        "nested",
        "--micro",
        "1",
        "3",
        "4",
        "--options",
        "plain",
        "eviction, clipped",
    ]
    if device == "sim":  # thousands of times slower
        return [*command, *wide, "--in-turn", "--steps", "6", "--orders", "10"]
    return [*command, *wide, "--steps", "50"]


def speed(device: str, workers: int, folder: str) -> dict[str, Any]:
    """Samples a second under `serial` and `nested`, in turn."""
    found: dict[str, Any] = {}
    for schedule, micro in (("serial", 1), ("serial", 8), ("nested", 8), ("nested", 16)):
        out = Path(folder) / "summary.json"
        settings = [*(TINY if device == "sim" else SPEED), f"pipeline.micro_batches={micro}"]
        command = [sys.executable, "-m", "nestpipe", "train", "dlrm", "--device", device, "--workers", str(workers)]
        command += ["--schedule", schedule, "--steps", "6" if device == "sim" else "200", "--json", str(out)]
        command += ["--run", str(Path(folder) / f"{schedule}-{micro}")]
        part = call(f"speed, {schedule} N={micro}", [*command, *(x for s in settings for x in ("--set", s))])
        if part["ok"]:
            summary = json.loads(out.read_text())
            part["samples_per_s"], part["digest"] = summary.get("samples_per_s"), summary.get("digest")
        found[f"{schedule} N={micro}"] = part
    return found


def main() -> int:
    args = arguments()
    print(
        "No figure of this check has been made on hardware: it was verified on a simulated device, never on an accelerator."
    )
    from nestpipe.device.choice import named_device

    device = named_device(args.device).type
    if device == "cpu":
        print("torch finds no accelerator here: name one with --device, or use --device sim", file=sys.stderr)
        return 2
    found: dict[str, Any] = {"facts": facts(device)}
    print(json.dumps(found["facts"], indent=2))
    workers = args.workers or sorted({1, 2 if device == "sim" else found["facts"]["devices"]})
    found["exactness"] = call("exactness: every schedule is serial, bit for bit", grid(device, workers, args.quick))
    if device in SANITIZERS:
        found["sanitizer"] = call(
            "the same under torch's sanitizer", grid(device, workers[:1], True), SANITIZERS[device]
        )
    proofs = [sys.executable, "-m", "pytest", "-q", "-s", "-m", "accelerator", "tests/device"]
    found["removals"] = call("waits and guards of memory removed on the simulated device: each is noticed", proofs)
    kernels = ROOT / "tests" / "ops" / "triton_kernels"
    if found["facts"]["triton"] and kernels.exists():
        command = [sys.executable, "-m", "pytest", "-q", str(kernels)]
        found["kernels"] = call("Triton kernels beside numba and torch", command)
    else:
        print(
            "\n== Triton is not installed (pip install 'nestpipe[triton]'): torch operations run in place of its kernels"
        )
    with tempfile.TemporaryDirectory() as folder:
        found["speed"] = speed(device, workers[-1], folder)
    Path(args.json).write_text(json.dumps(found, indent=2))
    parts = [
        found["exactness"],
        *found["speed"].values(),
        *(found[k] for k in ("removals", "sanitizer", "kernels") if k in found),
    ]
    failed = sum(not part["ok"] for part in parts)
    print(f"\n{len(parts) - failed} of {len(parts)} parts ok; please send back {args.json} (docs/accelerators.md)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
