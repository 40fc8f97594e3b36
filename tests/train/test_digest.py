"""The digest: another program, working from plain arrays and docs/digest.md alone, comes to the same 32 bytes."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
import torch

from nestpipe import SGD, Adam, EvictionPolicy, RowWiseAdagrad
from nestpipe.comm.world import World
from nestpipe.sparse.walk import walk
from nestpipe.train.digest import digest
from oracle import Trained
from training import Setting, gather, make_pipeline, my_batches
from workers import run

SETTINGS = [
    Setting("dlrm", RowWiseAdagrad(), steps=4, dtype="float32"),
    Setting("dlrm", SGD(), micro_batches=2, steps=4, dtype="float64"),
    Setting("hstu", Adam(), steps=4, dtype="float32"),
    Setting("dlrm", Adam(), steps=6, dtype="float32", life=EvictionPolicy(admit_after=2, ttl_steps=3, sweep_every=2)),
    Setting("hstu", SGD(), steps=6, dtype="float64", life=EvictionPolicy(max_rows=20, sweep_every=1)),
]
CHUNKS = [1, 2, 7, 1 << 16]


Waiting = dict[str, dict[int, tuple[int, int]]]


def trained_and_digested(
    world: World, setting: Setting
) -> tuple[str, Trained, list[dict[str, list[np.ndarray]]], Waiting]:
    """What the pipeline says of itself, this worker's part of it, all rows of all tables by walks of several widths, and what
    this worker knows of keys without a row."""
    pipeline = make_pipeline(world, setting)
    pipeline.model.register_buffer("temperature", torch.tensor(0.5), persistent=False)
    batches = my_batches(world, setting)
    while pipeline.progress(batches) is not None:
        pass
    said = digest(pipeline)
    mine = Trained()
    gather(pipeline, mine)
    mine.dense["temperature"] = np.array(0.5, np.float32)
    walks = []
    for chunk in CHUNKS:
        found = {}
        for table in mine.rows:
            group, number = pipeline.place_of(table)
            parts = list(walk(world, pipeline.stores[group], number, chunk))
            assert all(0 < len(keys) <= chunk * world.size for keys, _, _ in parts), "a chunk is bounded and not empty"
            assert not parts or world.rank == 0
            found[table] = [np.concatenate(column) for column in zip(*parts)]
        walks.append(found)
    waiting: Waiting = {}
    for group, store in zip(pipeline.sparse.groups, pipeline.sparse.stores):
        for number, table in enumerate(group.tables):
            waiting[table.name] = {}
            if store.frequencies is not None:
                keys, slots = store.frequencies.rows_of(number)
                waiting[table.name] = dict(zip(keys.tolist(), store.frequencies.usage[slots].tolist()))
    return said, mine, walks, waiting


def recompute(
    tables: dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
    dense: dict[str, np.ndarray],
    waiting: dict[str, dict[int, tuple[int, int]]],
    lives: bool,
) -> str:
    """The digest per docs/digest.md, of tables (keys, values, state; in any order) and dense tensors by name."""
    sha = hashlib.sha256(b"nestpipe-digest-1\0")
    for name in sorted(tables):
        keys, values, state = tables[name]
        sha.update(b"table that lives\0" if lives else b"table\0")
        sha.update(name.encode() + b"\0" + values.dtype.name.encode() + b"\0")
        sha.update(struct.pack("<QQ", values.shape[1], state.shape[1] - 2 * lives))
        whole = {"float32": np.int32, "float64": np.int64}[values.dtype.name]
        letter = {"float32": "f", "float64": "d"}[values.dtype.name]
        for row in sorted(range(len(keys)), key=lambda row: int(keys[row])):
            of_optimizer, of_life = (state[row, :-2], state[row, -2:]) if lives else (state[row], state[row, :0])
            numbers = [*values[row].tolist(), *of_optimizer.tolist()]
            sha.update(struct.pack(f"<q{len(numbers)}{letter}", int(keys[row]), *numbers))
            for number in of_life.view(whole).tolist():
                sha.update(struct.pack("<q", number))
        sha.update(struct.pack("<Q", len(keys)))
        if lives:
            for key, (seen, last) in sorted(waiting[name].items()):
                sha.update(struct.pack("<qqq", key, seen, last))
            sha.update(struct.pack("<Q", len(waiting[name])))
    for name in sorted(dense):
        array = dense[name]
        sha.update(b"dense\0" + name.encode() + b"\0" + array.dtype.name.encode() + b"\0")
        sha.update(struct.pack(f"<{1 + array.ndim}Q", array.ndim, *array.shape))
        sha.update(array.tobytes(order="C"))
    return sha.hexdigest()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: f"{s.model}-{s.dtype}" + "-lives" * (s.life is not None))
def test_another_program_computes_the_same_digest(setting: Setting, workers: int) -> None:
    """The documented layout is the one that is implemented, wherever the rows lie; and a walk in small chunks misses nothing."""
    results = run(workers, trained_and_digested, setting)
    assert len({said for said, *_ in results}) == 1, "every worker has the same digest"
    parts = [mine for _, mine, _, _ in results]
    tables = {}
    for name in parts[0].rows:
        columns = [np.concatenate([getattr(part, what)[name] for part in parts]) for what in ("keys", "rows", "state")]
        tables[name] = (columns[0], columns[1], columns[2])
    assert sum(len(keys) for keys, _, _ in tables.values()) > 20
    dense = dict(parts[0].dense)
    dense |= {f"optimizer.{name}": array for name, array in parts[0].dense_state.items()}
    assert any(array.ndim == 0 for array in dense.values()) and any(array.ndim == 2 for array in dense.values())
    waiting = {name: {k: v for part in results for k, v in part[3][name].items()} for name in tables}
    assert (setting.life is not None and setting.life.admit_after > 1) == any(waiting.values())
    assert results[0][0] == recompute(tables, dense, waiting, setting.life is not None)

    for found in results[0][2]:
        for name, columns in tables.items():
            order = np.argsort(columns[0])
            if not len(order):  # nothing was yielded
                assert found[name] == []
                continue
            for walked, column in zip(found[name], columns, strict=True):
                assert walked.dtype == column.dtype and np.array_equal(walked, column[order])
