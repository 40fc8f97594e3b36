"""Writes log/*.csv, a log of events as a shop might have it: in no order, text ids, times in milliseconds, three actions.

python make_log.py
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np


def write_log(folder: str, events: int = 40_000, files: int = 3) -> None:
    draw = np.random.default_rng(0)
    Path(folder).mkdir(exist_ok=True)
    users = draw.integers(0, 800, events)
    taste = users % 12  # users of one taste like the same 25 items, and look at them in turn
    seen = np.zeros(800, np.int64)
    rows = []
    for number, (user, group) in enumerate(zip(users.tolist(), taste.tolist())):
        seen[user] += 1
        item = 25 * group + int(seen[user] + user) % 25 if draw.random() < 0.7 else int(draw.integers(0, 300))
        viewed, bought, hidden = draw.random(3) < (0.8, 0.1, 0.02)
        moment = 1_700_000_000_000 + 60_000 * number
        rows.append((f"customer-{user}", f"sku-{item}", moment, int(viewed), int(bought), int(hidden)))
    for number, part in enumerate(np.array_split(draw.permutation(events), files)):
        with (Path(folder) / f"part-{number}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["customer", "sku", "moment", "viewed", "bought", "hidden"])
            writer.writerows(rows[place] for place in part)


if __name__ == "__main__":
    write_log("log", *map(int, sys.argv[1:]))
