"""What an owner and its replicas tell each other about a batch: the keys of their groups, and the sums of their headers.

Every replica holds the union of the keys that the groups touch, in the same order, and knows which of them each group uses last
in which micro-batch.  So each of them can tell what gradients will arrive when, and adds them in the same order: by micro-batch,
then group.

There are two messages per batch and pair of replicas, as in `routing`: a header of fixed size, and the keys, each tagged with its
table and the micro-batch of its last use in the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nestpipe.comm.exchange import Exchange
from nestpipe.keys.dedup import dedup_pairs
from nestpipe.keys.window import order_by, sizes_of

TABLE_BITS = 16


@dataclass(frozen=True)
class Counted:
    """What `route` counts, of some workers or of all."""

    terms: float
    """Loss terms."""
    samples: int
    ended: bool
    """The training data of all of them has ended."""
    seconds: float
    """When the batch was routed, by the clock of the first of them."""


@dataclass(frozen=True)
class OwnedKeys:
    """The keys of one table group that a shard group asked its owner for, each once."""

    tables: np.ndarray
    keys: np.ndarray
    last: np.ndarray
    """The micro-batch of the last use of every key in the group."""

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True)
class ReplicaPlan:
    """What the owners of a shard send each other of one table group in one batch."""

    rows: np.ndarray
    """Buffer rows in the order in which the groups' gradients are added: by (micro-batch of last use in the group, group)."""
    ends: np.ndarray
    """[N, M] ends of each (micro-batch, group) in rows."""
    sizes: list[list[int]]
    """[N][M]: rows of each (micro-batch, group)."""


@dataclass(frozen=True)
class Union:
    """The keys of one table group that any group touches: the same ones, in the same order, on all replicas."""

    tables: np.ndarray
    keys: np.ndarray
    own_rows: np.ndarray
    """Places of the keys of this worker's own group."""
    plan: ReplicaPlan


def tell_replicas(
    owned: Sequence[OwnedKeys], counted: Counted, micros: int, exchange: Exchange
) -> tuple[list[Union], Counted]:
    """Exchanges headers, then keys, with the other owners of this shard: the union per table group, and the counts of all."""
    replicas = exchange.world
    headers = torch.empty((replicas.size, _COUNTS + len(owned)), dtype=torch.int64)
    headers[replicas.rank] = _header(owned, counted)
    exchange.exchange([[headers[replicas.rank]]] * replicas.size, [[header] for header in headers])
    counts = headers[:, _COUNTS:].numpy()
    message = _message(owned)
    messages = [torch.empty(int(words_of(counts[group]).sum()), dtype=torch.int64) for group in range(replicas.size)]
    messages[replicas.rank] = message
    exchange.exchange([[message]] * replicas.size, [[m] for m in messages])
    unions = [_union(g, messages, counts, micros, replicas.rank) for g in range(len(owned))]
    return unions, _sum(headers)


_COUNTS = 4
"""Words of a header before the key counts."""


def _header(owned: Sequence[OwnedKeys], counted: Counted) -> torch.Tensor:
    header = np.empty(_COUNTS + len(owned), np.int64)
    header[0] = np.float64(counted.terms).view(np.int64)
    header[1] = counted.samples
    header[2] = counted.ended
    header[3] = np.float64(counted.seconds).view(np.int64)
    header[_COUNTS:] = [len(keys) for keys in owned]
    return torch.from_numpy(header)


def _sum(headers: torch.Tensor) -> Counted:
    """Of all groups, in their order.  The clock is that of the first worker of the first group."""
    return Counted(
        terms=float(headers[:, 0].contiguous().view(torch.float64).sum()),
        samples=int(headers[:, 1].sum()),
        ended=bool(headers[:, 2].all()),
        seconds=float(headers[0, 3:4].view(torch.float64)),
    )


def words_of(keys: np.ndarray) -> np.ndarray:
    """int64 words of a message with this many keys: one per key, and half a word for its tag."""
    return keys + (keys + 1) // 2


def pack(tables: np.ndarray, keys: np.ndarray, last: np.ndarray) -> list[np.ndarray]:
    """The words of a message: the keys, then their tags."""
    tags = np.zeros(len(keys) + len(keys) % 2, np.int32)
    tags[: len(keys)] = tables
    tags[: len(keys)] |= last << TABLE_BITS
    return [keys, tags.view(np.int64)]


def unpack(words: np.ndarray, per_group: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and tags of one table group in a message that has `per_group` keys of each."""
    start, n = int(words_of(per_group[:group]).sum()), int(per_group[group])
    return words[start : start + n], words[start + n : start + n + (n + 1) // 2].view(np.int32)[:n]


def untag(tags: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tables and micro-batches of last use."""
    return (tags & ((1 << TABLE_BITS) - 1)).astype(np.uint16), tags >> TABLE_BITS


def _message(owned: Sequence[OwnedKeys]) -> torch.Tensor:
    parts: list[np.ndarray] = [np.empty(0, np.int64)]  # a model may have no tables
    for one in owned:
        parts += pack(one.tables, one.keys, one.last)
    return torch.from_numpy(np.concatenate(parts))


def _union(group: int, messages: list[torch.Tensor], counts: np.ndarray, micros: int, me: int) -> Union:
    found = [unpack(message.numpy(), per_group, group) for message, per_group in zip(messages, counts)]
    tables, last = untag(np.concatenate([tags for _, tags in found]))
    unique_tables, unique_keys, rows = dedup_pairs(tables, np.concatenate([keys for keys, _ in found]))
    ends = np.cumsum(counts[:, group])
    groups = np.repeat(np.arange(len(messages), dtype=np.int32), counts[:, group])
    order, micro_ends = order_by(last, groups, micros, len(messages))
    return Union(
        unique_tables,
        unique_keys,
        rows[ends[me] - counts[me, group] : ends[me]],
        ReplicaPlan(rows[order], micro_ends, sizes_of(micro_ends)),
    )
