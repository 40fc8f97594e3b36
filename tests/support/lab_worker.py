"""A rung's worker that only sleeps: what a ladder sees of one, without torch's weight in it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "peers"))
from turns import Turns  # type: ignore[import-not-found]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    config = json.loads(arguments.config.read_text())
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    turns = Turns(arguments.out.parent, rank)
    turns.wait(0)
    turns.done(0)
    step_s = []
    for turn in range(1, config["turns"] + 1):
        turns.wait(turn)
        if config.get("fails_at") == turn and rank == 0:
            raise ValueError("this rung was made to fail")
        with (arguments.out.parents[1] / "order").open("a") as order:
            order.write(f"{config['name']} {turn}\n")
        time.sleep(config["step_s"])
        step_s.append([config["step_s"] * (1 + rank)])
        turns.done(turn)
    if rank == 0:
        report = {"workers": size, "config": {**config, "batch": 10, "steps": 1}, "first_losses": [0.5]}
        report |= {"step_s_by_rank": [[[(1 + r) * s[0]] for s in step_s] for r in range(size)]}
        report |= {key: [[s[0] for s in step_s] for _ in range(size)] for key in ("window_s_by_rank", "cpu_s_by_rank")}
        arguments.out.write_text(json.dumps(report))
    (arguments.out.parent / f"left-{rank}").touch()
    while rank == 0 and not all((arguments.out.parent / f"left-{r}").exists() for r in range(size)):
        time.sleep(0.01)


if __name__ == "__main__":
    main()
