"""Counts what must travel between hosts in a step, from the keys of a batch alone.

To hold against what was measured.  It shares nothing with the engine but the hash that says who owns a key: keys are
deduplicated here by plain numpy.  Payload only: a link also carries headers of packets, acknowledgements and `agree`.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from torch import nn

from nestpipe.data.batch import Batch
from nestpipe.keys import owners_of
from nestpipe.lab.layout import Layout
from nestpipe.lab.settings import PEERS, RungSettings
from nestpipe.lab.workloads import DLRMWorkload, HSTUWorkload, RungWorkload
from nestpipe.nn.collections import collections_in, place_lookups
from nestpipe.tables.optimizers import RowWiseAdagrad

KEY_BYTES, TAG_BYTES, FLOAT_BYTES, WORD_BYTES = 8, 4, 4, 8
HEADER_WORDS = 3
"""Before the counts of keys, of which there is one for each group of tables and micro-batch."""

BatchKeys = list[Mapping[int, np.ndarray]]
"""Of one worker's batch: for every group of tables, the distinct keys by number of table."""


@dataclass(frozen=True)
class Counted:
    """Bytes in a step that leave a host for another one, all hosts together."""

    keys: float = 0.0
    rows: float = 0.0
    gradients: float = 0.0
    headers: float = 0.0
    dense: float = 0.0
    """Dense gradients, summed around a ring of workers."""

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def count_flat(batches: Sequence[BatchKeys], dims: Sequence[int], layout: Layout, micros: int) -> Counted:
    """One group of all workers: keys go to their owners, rows come back, and gradients go the same way as the keys.

    `batches`: those of all workers, by rank.  `dims`: of every group of tables.
    """
    keys, rows = 0, 0
    for rank, batch in enumerate(batches):
        for tables, dim in zip(batch, dims):
            remote = sum(_remote(table, found, layout, layout.host_of(rank)) for table, found in tables.items())
            keys += remote
            rows += remote * dim * FLOAT_BYTES
    pairs = layout.workers * (layout.workers - layout.per_host)
    return Counted(keys * (KEY_BYTES + TAG_BYTES), rows, rows, headers=pairs * _header_bytes(len(dims), micros))


def count_replicas(batches: Sequence[BatchKeys], dims: Sequence[int], layout: Layout, micros: int) -> Counted:
    """A group of workers on each host (HSP): each row that a host touches is told to every other host, with one gradient.

    Rows stay on the host.  Their sum over its workers leaves it once for every other host, and so does the key.
    """
    keys, gradients = 0, 0
    others = layout.hosts - 1
    for host in range(layout.hosts):
        mine = batches[host * layout.per_host : (host + 1) * layout.per_host]
        for group, dim in enumerate(dims):
            touched = sum(len(found) for found in _union([batch[group] for batch in mine]).values())
            keys += touched * others
            gradients += touched * others * dim * FLOAT_BYTES
    pairs = layout.workers * others  # an owner has one replica on every other host
    return Counted(keys * (KEY_BYTES + TAG_BYTES), 0.0, gradients, headers=pairs * _header_bytes(len(dims), micros))


def count_dense(parameters: int, layout: Layout) -> float:
    """Bytes between hosts of a sum over all workers, around a ring in the order of ranks: one worker of a host sends on."""
    if layout.hosts == 1:
        return 0.0
    around = 2 * (layout.workers - 1) / layout.workers
    return layout.hosts * around * parameters * FLOAT_BYTES


def count_rung(settings: RungSettings, layout: Layout) -> Counted | None:
    """The mean over the batches of a ladder's workload.  None for what is not counted here: messages left out, other groups."""
    group_size = getattr(settings.pipeline, "group_size", None)
    flat = group_size in (None, layout.workers)
    by_host = group_size in ("host", layout.per_host)
    micros = settings.pipeline.micro_batches
    if settings.options.only or not (flat or by_host) or not isinstance(micros, int):
        return None
    if settings.options.kind not in ("dlrm", "hstu"):
        return None
    workload = _workload(settings)
    model = workload.model()
    places, dims = tables_of(model)
    count = count_flat if flat else count_replicas
    steps = settings.workload["distinct_batches"]
    streams = [workload.batches(rank) for rank in range(layout.workers)]
    counted = [count([keys_of(next(stream), places) for stream in streams], dims, layout, micros) for _ in range(steps)]
    dense = count_dense(sum(parameter.numel() for parameter in model.parameters()), layout)
    means = {field.name: float(np.mean([getattr(one, field.name) for one in counted])) for field in fields(Counted)}
    return Counted(**{**means, "dense": dense})


def tables_of(model: nn.Module) -> tuple[list[list[tuple[str, int]]], list[int]]:
    """For every group of tables: the features that look rows up, each with the number of its table; and the dims."""
    lookups, _ = place_lookups(collections_in(model), RowWiseAdagrad(), False)
    places = [list(zip(one.features, (int(number) for number in one.tables))) for one in lookups]
    return places, [one.group.dim for one in lookups]


def keys_of(batch: Batch, places: Sequence[Sequence[tuple[str, int]]]) -> BatchKeys:
    """The distinct keys of a batch: what one worker asks for in a step, whatever the micro-batches (window dedup)."""
    features = batch.sparse_features
    found: BatchKeys = []
    for group in places:
        parts: dict[int, list[np.ndarray]] = {}
        for feature, table in group:
            parts.setdefault(table, []).append(features[feature].values().numpy())
        found.append({table: np.unique(np.concatenate(keys)) for table, keys in parts.items()})
    return found


def _workload(settings: RungSettings) -> RungWorkload:
    if settings.options.kind == "hstu":
        return HSTUWorkload(settings.workload, settings.options)
    return DLRMWorkload(settings.workload, settings.options, _Same())


class _Same:
    """bench/peers/same_samples.py, which is no package."""

    def __init__(self) -> None:
        self.__dict__.update(runpy.run_path(str(PEERS / "same_samples.py")))


def _remote(table: int, keys: np.ndarray, layout: Layout, host: int) -> int:
    owners = owners_of(np.full(len(keys), table, np.uint16), keys, layout.workers)
    return int((owners // layout.per_host != host).sum())


def _union(batches: Iterable[Mapping[int, np.ndarray]]) -> dict[int, np.ndarray]:
    parts: dict[int, list[np.ndarray]] = {}
    for batch in batches:
        for table, keys in batch.items():
            parts.setdefault(table, []).append(keys)
    return {table: np.unique(np.concatenate(keys)) for table, keys in parts.items()}


def _header_bytes(groups: int, micros: int) -> int:
    return WORD_BYTES * (HEADER_WORDS + groups * micros)
