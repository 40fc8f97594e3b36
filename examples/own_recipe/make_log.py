"""Writes clicks.parquet, a small log: who saw which item, what they had seen before, at what hour, and whether they clicked.

    python make_log.py

Your own log needs no more than this: a row for each sample, ids as whole numbers (or strings), lists of ids where a sample has
several, numbers, and a label of 0 or 1.
"""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def write_log(path: str, rows: int = 20_000) -> None:
    draw = np.random.default_rng(0)
    users, items = draw.integers(0, 500, rows), draw.integers(0, 200, rows)
    history = [draw.integers(0, 200, draw.integers(0, 5)) for _ in range(rows)]  # may be empty
    hour = draw.integers(0, 24, rows)
    # Some users click more than others, some items are better, and evenings are good.
    odds = (users % 5 - 2) * 0.7 + (items % 7 - 3) * 0.5 + np.where(hour > 18, 0.7, 0.0)
    clicked = draw.random(rows) < 1 / (1 + np.exp(-odds))
    columns = {
        "user_id": users,
        "item_id": items,
        "last_items": history,
        "hour": hour / 24,
        "clicked": clicked.astype(np.int8),
    }
    pq.write_table(pa.table(columns), path, row_group_size=5_000)


if __name__ == "__main__":
    write_log("clicks.parquet", *map(int, sys.argv[1:]))
