"""Checks the simulator: step times that a calibrated profile predicts, against measurements that it was not made from.

    python bench/predicted.py lab.toml [--workers 2 3 4] [--links 500mbit 1gbit] [--rounds 5]      (root, two minutes)

`nestpipe simulate --calibrate lab.toml` makes `lab.toml` from two serial rungs on two hosts with 250 mbit links.  This
program runs `nested` on more workers and faster links.  Exits with 1 if a prediction is more than 15 % off.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from nestpipe.lab.calibrate import LADDER, MB_PER_MS
from nestpipe.lab.ladder import load_ladder
from nestpipe.lab.network import megabytes_per_ms
from nestpipe.lab.running import run_ladder
from nestpipe.sim.figures import Settings, run
from nestpipe.sim.profile import load_profile
from nestpipe.sim.systems import SYSTEMS
from nestpipe.train.display import Display

RUNG = "nested N=8"
MOST = 0.15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--links", nargs="+", default=["500mbit", "1gbit"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    profile = load_profile(args.profile)
    ladder = load_ladder(LADDER).only([RUNG])
    worst = 0.0
    lines = []
    for workers in args.workers:
        for link in args.links:
            settings = Settings(link=megabytes_per_ms(link) / MB_PER_MS)
            predicted = run(SYSTEMS["nestpipe"], profile, workers, settings).step_ms
            with Display(f"{workers} workers, {link}") as display:
                rung = run_ladder(replace(ladder, workers=workers), [], args.rounds, display.show, link)["rungs"][0]
            error = predicted / rung["step_ms"] - 1
            worst = max(worst, abs(error))
            spread = f"{min(rung['step_ms_all']):.0f} to {max(rung['step_ms_all']):.0f}"
            lines.append(
                f"| {workers} | {link} | {predicted:.0f} ms | {rung['step_ms']:.0f} ms ({spread}) | {error:+.0%} |"
            )
    print("| workers | links | predicted | measured | error |\n| --- | --- | --- | --- | --- |")
    print("\n".join(lines))
    return 0 if worst <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
