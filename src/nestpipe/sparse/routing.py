"""Routing: sends keys from the workers that need them to those that own them, and builds the index lists for their
rows.

There are two messages per batch and pair of workers, whatever the number of tables: a header of fixed size (loss terms,
samples, time, keys per group and micro-batch), and the keys, each tagged with its table and the micro-batch of its last
use.  They stay inside the shard group.  Where there are several, owners then tell their replicas (`replicas`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from nestpipe.comm.exchange import Exchange
from nestpipe.keys.dedup import dedup_pairs
from nestpipe.keys.window import Window, order_by, sizes_of
from nestpipe.sparse.replicas import Counted, OwnedKeys, ReplicaPlan, pack, tell_replicas, unpack, untag, words_of


@dataclass(frozen=True)
class OwnerPlan:
    """What this worker serves as owner of one group in one batch: R unique rows, and who needs them when.

    With replicas, the rows are those that any shard group touches; who needs them is asked inside the own one.
    """

    tables: np.ndarray
    keys: np.ndarray
    embed_rows: np.ndarray
    """Buffer rows in the order in which they are sent: by (micro-batch of first use, requester)."""
    embed_ends: np.ndarray
    """[N, W] ends of each (micro-batch, requester) in embed_rows."""
    grad_rows: np.ndarray
    """Buffer rows in the order in which their gradients arrive: by (micro-batch of last use, requester)."""
    grad_ends: np.ndarray
    """[N, W] ends of each (micro-batch, requester) in grad_rows."""
    embed_sizes: list[list[int]]
    """[N][W]: rows of each (micro-batch, requester) in embed_rows."""
    grad_sizes: list[list[int]]
    replicas: ReplicaPlan | None = None

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class Routes:
    """What `route` learned about a batch."""

    windows: list[Window]
    """Per group: what this worker needs."""
    owned: list[OwnerPlan]
    """Per group: what this worker serves."""
    terms: float
    """Loss terms of the whole global batch."""
    samples: int
    """Samples of the whole global batch."""
    ended: bool
    """The training data of every worker has ended."""
    seconds: float = 0.0
    """When the batch was routed, by the clock of worker 0."""
    group_terms: float = 0.0
    """Loss terms of the own shard group's part of the global batch."""


def route(
    windows: list[Window],
    terms: float,
    samples: int,
    micros: int,
    exchange: Exchange,
    seconds: float = 0.0,
    replicas: Exchange | None = None,
    union: bool = True,
) -> Routes:
    """Exchanges headers, then keys, inside the shard group, and then with replicas, if there are any.

    Without `union`, replicas tell each other what they count and keep their keys to themselves.
    A worker without data takes part with empty windows.
    """
    world = exchange.world
    headers_out = _headers(windows, terms, samples, seconds, micros, world.size)
    headers_in = torch.empty_like(headers_out)
    exchange.exchange([[h] for h in headers_out], [[h] for h in headers_in])
    headers_in[world.rank] = headers_out[world.rank]
    # counts[s, g, m]: keys of group g that worker s needs from this worker, first used in m
    counts = headers_in[:, _COUNTS:].reshape(world.size, len(windows), micros).numpy()
    messages_out = [_message(windows, owner, micros) for owner in range(world.size)]
    messages_in = [torch.empty(int(words_of(counts[s].sum(1)).sum()), dtype=torch.int64) for s in range(world.size)]
    messages_in[world.rank] = messages_out[world.rank]
    exchange.exchange([[m] for m in messages_out], [[m] for m in messages_in])
    owned = [_owner_plan(group, messages_in, counts, micros) for group in range(len(windows))]
    samples_of = headers_in[:, 1]
    counted = Counted(
        terms=float(headers_in[:, 0].contiguous().view(torch.float64).sum()),
        samples=int(samples_of.clamp(min=0).sum()),
        ended=bool((samples_of == NO_DATA).all()),
        seconds=float(headers_in[0, 2:3].view(torch.float64)),
    )
    group_terms = counted.terms
    if replicas is not None and replicas.world.size > 1 and not union:
        _, counted = tell_replicas([], counted, micros, replicas)
    elif replicas is not None and replicas.world.size > 1:
        asked = [OwnedKeys(plan.tables, plan.keys, _last_uses(plan, micros)) for plan in owned]
        unions, counted = tell_replicas(asked, counted, micros, replicas)
        owned = [
            replace(
                plan,
                tables=union.tables,
                keys=union.keys,
                embed_rows=union.own_rows[plan.embed_rows],
                grad_rows=union.own_rows[plan.grad_rows],
                replicas=union.plan,
            )
            for plan, union in zip(owned, unions)
        ]
    return Routes(windows, owned, counted.terms, counted.samples, counted.ended, counted.seconds, group_terms)


NO_DATA, REFUSED = -1, -2
"""Sent in place of the number of samples: this worker's data has ended; its batch has an error, which it will raise."""


_COUNTS = 3
"""Words of a header before the key counts."""


def _headers(
    windows: list[Window], terms: float, samples: int, seconds: float, micros: int, workers: int
) -> torch.Tensor:
    headers = np.empty((workers, _COUNTS + len(windows) * micros), np.int64)
    headers[:, 0] = np.float64(terms).view(np.int64)
    headers[:, 1] = samples
    headers[:, 2] = np.float64(seconds).view(np.int64)
    for g, window in enumerate(windows):
        counts = np.diff(window.first_ends.reshape(-1), prepend=0).reshape(micros, workers)
        headers[:, _COUNTS + g * micros : _COUNTS + (g + 1) * micros] = counts.T
    return torch.from_numpy(headers)


def _message(windows: list[Window], owner: int, micros: int) -> torch.Tensor:
    """Per group: the keys, micro-batch by micro-batch, then their tags."""
    parts: list[np.ndarray] = [np.empty(0, np.int64)]  # a model may have no tables
    for window in windows:
        ranges = [window.first_range(m, owner) for m in range(micros)]
        keys = np.concatenate([window.keys[start:stop] for start, stop in ranges])
        tables = np.concatenate([window.tables[start:stop] for start, stop in ranges])
        parts += pack(tables, keys, np.concatenate([window.last[start:stop] for start, stop in ranges]))
    return torch.from_numpy(np.concatenate(parts))


def _owner_plan(group: int, messages: list[torch.Tensor], counts: np.ndarray, micros: int) -> OwnerPlan:
    workers = len(messages)
    found = [unpack(message.numpy(), counts[s].sum(1), group) for s, message in enumerate(messages)]
    tables, last = untag(np.concatenate([tags for _, tags in found]))
    unique_tables, unique_keys, rows = dedup_pairs(tables, np.concatenate([keys for keys, _ in found]))
    received = counts[:, group, :]
    requesters = np.repeat(np.arange(workers, dtype=np.int32), received.sum(1))
    first = np.repeat(np.tile(np.arange(micros, dtype=np.int32), workers), received.reshape(-1))
    embed_order, embed_ends = order_by(first, requesters, micros, workers)
    grad_order, grad_ends = order_by(last, requesters, micros, workers)
    return OwnerPlan(
        unique_tables,
        unique_keys,
        rows[embed_order],
        embed_ends,
        rows[grad_order],
        grad_ends,
        sizes_of(embed_ends),
        sizes_of(grad_ends),
    )


def _last_uses(plan: OwnerPlan, micros: int) -> np.ndarray:
    """Per row: the last micro-batch in which any worker of this shard group uses it."""
    in_micro = np.array([sum(sizes) for sizes in plan.grad_sizes], np.int64)
    last = np.zeros(len(plan), np.int32)
    # Of a row's entries the last one stays.
    last[plan.grad_rows] = np.repeat(np.arange(micros, dtype=np.int32), in_micro)
    return last
