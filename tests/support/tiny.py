"""Tiny data of every kind, and what makes two batches, or two samples, the same."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nestpipe.data.batch import Batch

KIND_NAMES = ["clicks", "sequences", "histories", "movielens-clicks", "movielens-sequences", "interactions",
              "interactions-streamed", "criteo", "parquet", "parquet-shuffled"]  # fmt: skip
SAMPLES = 137


def samples_of(batch: Batch) -> list[bytes]:
    """Everything that belongs to each sample, as bytes."""
    features, count = batch.sparse_features, len(batch)
    values, offsets = features.values().numpy(), features.offsets().tolist()
    tensors = [batch.dense, batch.labels, batch.loss_terms, *batch.extras.values()]
    rows = [tensor.numpy() for tensor in tensors if tensor is not None]
    spans = [range(b, count * len(features.keys()), count) for b in range(count)]
    return [
        b"|".join([values[offsets[i] : offsets[i + 1]].tobytes() for i in span] + [row[b].tobytes() for row in rows])
        for b, span in enumerate(spans)
    ]


def criteo_line(rng: np.random.Generator) -> str:
    integers = ["" if rng.random() < 0.2 else str(rng.integers(-3, 1000)) for _ in range(13)]
    ids = ["" if rng.random() < 0.2 else f"{rng.integers(0, 2**32):08x}" for _ in range(26)]
    return "\t".join([str(rng.integers(0, 2)), *integers, *ids])


def write_criteo(folder: Path) -> list[Path]:
    """Two files of SAMPLES lines; the first does not end with a newline."""
    rng = np.random.default_rng(1)
    lines = [criteo_line(rng) for _ in range(SAMPLES)]
    files = [folder / "day_0", folder / "day_1"]
    files[0].write_text("\n".join(lines[:50]))
    files[1].write_text("\n".join(lines[50:]) + "\n")
    return files


def write_parquet(folder: Path) -> Path:
    """Three files, one of no rows, with several row groups of uneven size."""
    rng = np.random.default_rng(2)
    lists = [None if rng.random() < 0.1 else rng.integers(-5, 5, rng.integers(0, 4)).tolist() for _ in range(SAMPLES)]
    table = pa.table(
        {
            "user": pa.array(rng.integers(0, 1 << 60, SAMPLES)),
            "tags": pa.array(lists, pa.list_(pa.int32())),
            "city": pa.array([None if rng.random() < 0.1 else f"city {rng.integers(0, 9)}" for _ in range(SAMPLES)]),
            "price": pa.array(rng.normal(size=SAMPLES)),
            "clicked": pa.array(rng.integers(0, 2, SAMPLES), pa.int8()),
        }
    )
    folder.mkdir()
    pq.write_table(table[:60], folder / "a.parquet", row_group_size=17)
    pq.write_table(table[60:60], folder / "b.parquet")
    pq.write_table(table[60:], folder / "c.parquet", row_group_size=30)
    return folder


def write_ratings(path: Path) -> Path:
    """u.data of SAMPLES users with 3 to 20 ratings, many in the same second."""
    rng = np.random.default_rng(3)
    rows = [
        f"{user}\t{rng.integers(1, 60)}\t{rng.integers(1, 6)}\t{rng.integers(10, 15)}"
        for user in range(1, SAMPLES + 1)
        for _ in range(rng.integers(3, 20))
    ]
    path.write_text("\n".join(np.array(rows)[rng.permutation(len(rows))].tolist()) + "\n")
    return path


def write_events(folder: Path) -> Path:
    """Three Parquet files of events of SAMPLES users, in any order, many at the same time."""
    rng = np.random.default_rng(4)
    users = np.repeat(np.arange(SAMPLES), rng.integers(3, 20, SAMPLES))
    count = len(users)
    table = pa.table(
        {
            "user_id": users[rng.permutation(count)],
            "item_id": rng.integers(1, 60, count),
            "timestamp": rng.integers(10, 15, count),
            "click": rng.integers(0, 2, count),
            "like": rng.integers(0, 2, count),
            "weight": rng.random(count),
            "place": [f"place {n}" for n in rng.integers(0, 5, count)],
        }
    )
    folder.mkdir()
    cuts = [0, count // 7, count // 2, count]
    for number, (start, stop) in enumerate(pairwise(cuts)):
        pq.write_table(table[start:stop], folder / f"{number}.parquet", row_group_size=50)
    return folder
