"""Writes an export for serving from a checkpoint: all tables in blocks, the dense model, the recipe.  Whole, or not at all.

Rows are sorted by hash out of core: they are dealt into files by the first bits of it, and each of these is sorted in memory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from nestpipe.checkpoint.dense import model_tensors
from nestpipe.checkpoint.folder import Checkpoint
from nestpipe.checkpoint.manifest import Group, sync_directory
from nestpipe.checkpoint.merge import merged_rows
from nestpipe.checkpoint.tensors import read_tensors, write_tensors
from nestpipe.infer.block_kernels import hashes_of
from nestpipe.infer.block_layout import Stored
from nestpipe.infer.quantise import RowChange
from nestpipe.infer.serving_files import DataShape, ServingManifest, ServingTable, write_serving
from nestpipe.infer.table_writer import TableWriter
from nestpipe.tables.snapshot import Rows

BUCKET_BYTES = 1 << 26
"""Rows that are sorted at once, about."""
MOST_BUCKETS = 256


@dataclass(frozen=True)
class ServingExport:
    path: Path
    manifest: ServingManifest
    changes: dict[str, RowChange]
    """How far the rows of each table moved, where they are stored in fewer bits."""

    @property
    def rows(self) -> int:
        return sum(table.rows for table in self.manifest.tables)


def export_for_serving(
    chain: list[Checkpoint],
    to: Path,
    data: DataShape,
    catalogue: np.ndarray | None = None,
    *,
    stored: Stored | None = None,
    on_progress: Callable[[float], None] = lambda done: None,
) -> ServingExport:
    """The last checkpoint of a chain as a directory `to`.  `stored`: None leaves rows as they are.

    Memory holds the keys that changed since the first checkpoint of the chain, one file of it, and one part to sort.
    """
    refuse(to)
    last = chain[-1].manifest
    making = to.with_name(f".{to.name}.{os.getpid()}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    try:
        tables: list[ServingTable] = []
        changes: dict[str, RowChange] = {}
        groups = [(number, group) for number, group in enumerate(last.groups) if not group.waiting]
        for turn, (number, group) in enumerate(groups):

            def show(done: float, turn: int = turn) -> None:
                on_progress((turn + done) / len(groups))

            rows = merged_rows(chain, number, show)
            for table, change in _write_group(making, group, rows, stored, len(tables)):
                tables.append(table)
                changes[table.name] = change
        dense = last.of("dense")[0]
        tensors = model_tensors(read_tensors(chain[-1].path / dense.name, dense.written))
        items = [] if catalogue is None else [write_tensors(making / "catalogue.safetensors", {"items": catalogue})]
        manifest = ServingManifest(
            last.step,
            chain[-1].digest,
            tables,
            write_tensors(making / "dense.safetensors", tensors),
            last.recipe,
            data,
            items,
            datetime.now(UTC).isoformat(timespec="seconds"),
        )
        write_serving(making, manifest)
        for path in making.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(making)
        refuse(to)  # again: it may have taken hours
        making.rename(to)
        sync_directory(to.parent)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return ServingExport(to, manifest, changes if stored is not None else {})


def refuse(to: Path) -> None:
    """ValueError if nothing can be written there."""
    if not to.parent.is_dir():
        raise ValueError(f"--to {to} cannot be written: no folder '{to.parent}'")
    if to.exists() or to.is_symlink():
        raise ValueError(f"'{to}' already exists: choose another name, or remove it")


def _write_group(
    directory: Path, group: Group, rows: Iterator[Rows], stored: Stored | None, first: int
) -> Iterator[tuple[ServingTable, RowChange]]:
    buckets = _Buckets(directory, group)
    for part in rows:
        buckets.deal(part)
    kind: Stored = stored or group.dtype  # type: ignore[assignment]
    writers = [
        TableWriter(directory, first + number, name, group.dim, group.dtype, kind)
        for number, name in enumerate(group.tables)
    ]
    for held in buckets.in_order():
        order = np.lexsort((hashes_of(np.ascontiguousarray(held["key"])), held["table"]))
        held = held[order]
        ends = np.searchsorted(held["table"], np.arange(len(writers) + 1))
        for number in np.flatnonzero(np.diff(ends)):
            mine = held[ends[number] : ends[number + 1]]
            writers[number].add(np.ascontiguousarray(mine["key"]), np.ascontiguousarray(mine["values"]))
    for writer in writers:
        yield writer.finish(), writer.change


class _Buckets:
    """Rows of a group by the first bits of their hash, in files that are gone when they were read."""

    def __init__(self, directory: Path, group: Group) -> None:
        self._kind = np.dtype([("key", "<i8"), ("table", "<u2"), ("values", group.dtype, (group.dim,))])
        wanted = -(-group.rows * self._kind.itemsize // BUCKET_BYTES)
        self._bits = min(max(wanted - 1, 0).bit_length(), MOST_BUCKETS.bit_length() - 1)
        self._paths = [directory / f"bucket{number}" for number in range(1 << self._bits)]

    def deal(self, rows: Rows) -> None:
        records = np.empty(len(rows), self._kind)
        records["key"], records["table"], records["values"] = rows.keys, rows.tables, rows.values
        if not self._bits:
            self._append(0, records)
            return
        bucket = hashes_of(rows.keys) >> np.uint64(64 - self._bits)
        order = np.argsort(bucket, kind="stable")
        ends = np.searchsorted(bucket[order], np.arange(len(self._paths) + 1, dtype=np.uint64))
        for number in np.flatnonzero(np.diff(ends)):
            self._append(int(number), records[order[ends[number] : ends[number + 1]]])

    def _append(self, number: int, records: np.ndarray) -> None:
        with self._paths[number].open("ab") as file:
            file.write(memoryview(records.view(np.uint8)))  # type: ignore[arg-type]

    def in_order(self) -> Iterator[np.ndarray]:
        for path in self._paths:
            if path.exists():
                yield np.fromfile(path, self._kind)
                path.unlink()
