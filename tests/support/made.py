"""Checkpoints made by hand: two workers, two table groups, a full one of step 5 and what changed until step 10."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nestpipe.checkpoint.manifest import Base, File, Manifest, name_of, seal
from nestpipe.checkpoint.saved_rows import describe
from nestpipe.checkpoint.tensors import write_tensors
from nestpipe.keys import owners_of
from nestpipe.tables.config import EmbeddingConfig
from nestpipe.tables.group import TableGroup, group_tables
from nestpipe.tables.optimizers import Adagrad

WORKERS = 2
FULL, CHANGED = 5, 10
KEYS = 40

Table = dict[int, tuple[np.ndarray, np.ndarray]]
"""Values and state by key."""


def groups() -> list[TableGroup]:
    configs = [EmbeddingConfig(name, dim, [name]) for name, dim in (("item", 4), ("shop", 4), ("user", 3))]
    return group_tables(configs, Adagrad(0.1))


def make(folder: Path) -> dict[str, Table]:
    """Writes both; returns what is in the tables at the end."""
    random = np.random.default_rng(1)
    tables: dict[str, Table] = {}
    first = _write(folder, random, tables, FULL, [], KEYS, 0)
    _write(folder, random, tables, CHANGED, [first], KEYS // 2, KEYS // 8)
    return tables


def _write(
    folder: Path,
    random: np.random.Generator,
    tables: dict[str, Table],
    step: int,
    base: list[Base],
    keys: int,
    gone: int,
) -> Base:
    """One checkpoint: `gone` keys of each table go, `keys` random ones are trained, and some that were there."""
    directory = folder / name_of(step)
    directory.mkdir(parents=True)
    files: list[File] = []
    described = []
    for g, group in enumerate(groups()):
        changed, removed = [], []
        for number, config in enumerate(group.tables):
            table = tables.setdefault(config.name, {})
            for key in list(table)[:gone]:
                del table[key]
                removed.append((number, key))
            again = list(table)[: keys // 2]
            new = random.integers(-1000, 1000, keys).tolist()
            for key in random.permutation(again + new).tolist():
                table[key] = tuple(random.normal(size=(2, group.dim)).astype(np.float32))
                changed.append((number, key))
        described.append(replace(describe(group), rows=sum(len(tables[config.name]) for config in group.tables)))
        for kind, pairs in (("rows", list(dict.fromkeys(changed))), ("removed", removed)):
            if not pairs:
                continue
            numbers, ids = np.array([p[0] for p in pairs], np.uint16), np.array([p[1] for p in pairs], np.int64)
            for worker in range(WORKERS):
                mine = owners_of(numbers, ids, WORKERS) == worker
                tensors = {"keys": ids[mine], "tables": numbers[mine]}
                if kind == "rows":
                    rows = [tables[group.tables[t].name][k] for (t, k), m in zip(pairs, mine) if m]
                    values, state = (np.array(part).reshape(-1, group.dim) for part in zip(*rows))
                    tensors |= {"values": values, "state": state}
                written = write_tensors(directory / f"worker{worker}-group{g}-{kind}.safetensors", tensors)
                files.append(File(**asdict(written), kind=kind, worker=worker, group=g, rows=int(mine.sum())))
    for worker in range(WORKERS):
        generator = torch.Generator().manual_seed(step + worker)
        written = write_tensors(directory / f"worker{worker}.safetensors", {"random": generator.get_state()})
        files.append(File(**asdict(written), kind="worker", worker=worker))
    dense = {"weight": torch.full((2, 3), float(step)), "optimizer.weight.step": torch.tensor(float(step))}
    written = write_tensors(directory / "dense.safetensors", dense)
    files.append(File(**asdict(written), kind="dense", worker=0))
    manifest = Manifest(
        step,
        WORKERS,
        files,
        described,
        base,
        data={
            "streams": 2,
            "positions": {str(n): {"epoch": 0, "interval": n, "unit": step} for n in range(2)},
            "extent": 1000,
            "skipped": {},
        },
        trainer={
            "samples": 100 * step,
            "seconds": 1.5,
            "losses": [0.5, 0.25],
            "micro_batches_chosen": [[0, 1], [3, 4]],
        },
        metrics={"auc": 0.5 + step / 100, "ne": 1.0 - step / 100},
        recipe='name = "made"\n[checkpoint]\nbest = "auc"\n',
        created=f"2026-11-16T10:00:{step:02d}+00:00",
    )
    return Base(directory.name, seal(directory, manifest))


def reseal(directory: Path, text: bytes) -> None:
    """Makes any bytes the manifest of a checkpoint, with the COMMIT that is right for them."""
    (directory / "manifest.json").write_bytes(text)
    (directory / "COMMIT").write_bytes(hashlib.sha256(text).hexdigest().encode() + b"\n")


def manifest_of(directory: Path) -> dict[str, Any]:
    found = json.loads((directory / "manifest.json").read_bytes())
    assert isinstance(found, dict)
    return found
