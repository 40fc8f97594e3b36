"""Key-centric clustering: which samples of a batch go into the same micro-batch, so that they share as many keys as can be.

Micro-batches stay of equal size (histories: of as even a number of tokens as can be, or of as even a cost, where samples have
`costs`) and every sample is in exactly one, so what is trained is the same mean over the same samples.  Worth it where rows
travel once per micro-batch; with window dedup they travel once per batch whatever the clustering.

The way, chosen by measurement (docs/log.md): samples sorted by the commonest of their keys that fits into one micro-batch give a
first division; then every sample in turn moves to where most of its keys are, with some slack in the sizes, since with none a
sample that leaves finds every other part full; at the end parts that are too large give up what they miss least.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
import torch

from nestpipe.data.batch import Batch
from nestpipe.data.jagged import KeyedJaggedTensor
from nestpipe.keys.dedup import dedup_pairs

PASSES = 3
SLACK = 0.2
_UNITS = 1 << 40


def cluster(batch: Batch, parts: int, looked_up: Sequence[str] | None = None) -> list[Batch]:
    """As `batch.split(parts)`, with samples that share keys together.  The same batch gives the same parts, always.

    `looked_up`: only these features count; others, such as times, bring no rows.
    """
    if parts == 1 or len(batch) <= parts:
        return batch.split(parts)
    sizes = batch.loss_terms if batch.costs is None else batch.costs
    terms = None if sizes is None else sizes.double().numpy()
    features = batch.sparse_features
    if looked_up is not None and len(looked_up) < len(features.keys()):
        features = KeyedJaggedTensor.from_jt_dict({name: features[name] for name in looked_up})
    chosen = part_of_samples(features, parts, terms)
    order = np.argsort(chosen, kind="stable")
    ends = np.cumsum(np.bincount(chosen, minlength=parts))
    return [batch.select(torch.from_numpy(part)) for part in np.split(order, ends[:-1])]


def part_of_samples(features: KeyedJaggedTensor, parts: int, terms: np.ndarray | None = None) -> np.ndarray:
    """The part of each sample; sizes differ by at most one, or, where samples have `terms`, their sums by the largest."""
    samples, count = features.stride(), len(features.keys())
    lengths = features.lengths().numpy()
    per_feature = lengths.reshape(count, samples).sum(1)
    names = np.repeat(np.arange(count, dtype=np.uint16), per_feature)
    _, _, inverse = dedup_pairs(names, np.ascontiguousarray(features.values().numpy(), np.int64))
    weights = np.ones(samples, np.int64) if terms is None or not terms.sum() > 0 else _whole(terms)
    total = int(weights.sum())
    sizes = np.diff([total * part // parts for part in range(parts + 1)])
    unique = int(inverse.max()) + 1 if len(inverse) else 0
    ends, keys, counts = _shared_keys(inverse, features.offsets().numpy(), samples, count, unique)
    # Small numbers where they do: this is what has to stay in the cache.
    narrow = np.uint16 if counts.max(initial=0) < 1 << 16 else np.uint32
    return _cluster(ends, keys, counts, weights, sizes, np.zeros((len(counts), parts), narrow), PASSES, SLACK)


def _whole(terms: np.ndarray) -> np.ndarray:
    """Terms in whole units, of which all together have so many that rounding does not matter."""
    return np.rint(np.nan_to_num(terms / terms.sum()) * _UNITS).astype(np.int64)


def compile_clustering() -> None:
    """So that the first batch does not wait for a compiler."""
    few = KeyedJaggedTensor(["f"], torch.tensor([1, 1, 2, 2]), lengths=torch.ones(4, dtype=torch.int64))
    part_of_samples(few, 2)
    ends, keys = np.arange(1, 5), np.array([0, 0, 1, 1], np.int32)
    for narrow in (np.uint16, np.uint32):
        counts, ones = np.full(2, 2, np.int32), np.ones(4, np.int64)
        _cluster(ends, keys, counts, ones, np.full(2, 2), np.zeros((2, 2), narrow), PASSES, SLACK)


@numba.njit(nogil=True, cache=True)
def _shared_keys(inverse, offsets, samples, features, unique):  # type: ignore[no-untyped-def]
    """Sample by sample, its keys that come more than once, numbered anew: (ends, keys), and how often each comes."""
    times = np.zeros(unique, np.int32)
    for i in range(inverse.shape[0]):
        times[inverse[i]] += 1
    number = np.full(unique, -1, np.int32)  # few keys are shared, so what is kept of each part stays in the cache
    counts = np.empty(unique, np.int32)
    shared = 0
    for u in range(unique):
        if times[u] > 1:
            number[u] = shared
            counts[shared] = times[u]
            shared += 1
    ends = np.empty(samples, np.int64)
    keys = np.empty(inverse.shape[0], np.int32)
    total = 0
    for b in range(samples):
        for f in range(features):
            for j in range(offsets[f * samples + b], offsets[f * samples + b + 1]):
                if number[inverse[j]] >= 0:
                    keys[total] = number[inverse[j]]
                    total += 1
        ends[b] = total
    return ends, keys[:total], counts[:shared]


@numba.njit(nogil=True, cache=True)
def _first_parts(ends, keys, counts, weights, sizes):  # type: ignore[no-untyped-def]
    """Samples sorted by their pivot, the commonest of their keys that has room in one part; then dealt out in order."""
    samples, room = ends.shape[0], ends.shape[0] // sizes.shape[0]
    pivots = np.full(samples, np.int64(1) << 40, np.int64)
    start = 0
    for b in range(samples):
        most = 0
        for j in range(start, ends[b]):
            if most < counts[keys[j]] <= room:
                most = counts[keys[j]]
                pivots[b] = keys[j]
        start = ends[b]
    parts = np.empty(samples, np.int64)
    part, filled = 0, 0
    for b in np.argsort(pivots, kind="mergesort"):
        while filled >= sizes[part] and part + 1 < sizes.shape[0]:
            part += 1
            filled = 0
        parts[b] = part
        filled += weights[b]
    return parts


@numba.njit(nogil=True, cache=True)
def _look_out(keys, start, end, there, part, overlap):  # type: ignore[no-untyped-def]
    """overlap[p] = how many of a sample's keys others have in part p; the sample itself is in `part`."""
    overlap[:] = 0
    own = 0
    for j in range(start, end):
        row = there[keys[j]]
        for p in range(overlap.shape[0]):
            overlap[p] += row[p] > 0
        own += row[part] == 1
    overlap[part] -= own


@numba.njit(nogil=True, cache=True)
def _move(keys, start, end, there, old, new):  # type: ignore[no-untyped-def]
    for j in range(start, end):
        row = there[keys[j]]
        row[old] -= 1
        row[new] += 1


@numba.njit(nogil=True, cache=True)
def _cluster(ends, keys, counts, weights, sizes, there, passes, slack):  # type: ignore[no-untyped-def]
    """`there`: of how many samples' keys each part has each key; zeros."""
    samples, parts_count = ends.shape[0], sizes.shape[0]
    parts = _first_parts(ends, keys, counts, weights, sizes)
    held = np.zeros(parts_count, np.int64)
    for b in range(samples):
        for j in range(ends[b - 1] if b else 0, ends[b]):
            there[keys[j], parts[b]] += 1
        held[parts[b]] += weights[b]
    overlap = np.empty(parts_count, np.int32)
    most = np.int64(np.ceil(sizes.max() * (1 + slack)))
    for _ in range(passes):
        for b in range(samples):
            start, end, old = ends[b - 1] if b else 0, ends[b], parts[b]
            _look_out(keys, start, end, there, old, overlap)
            held[old] -= weights[b]
            best = old
            for p in range(parts_count):
                more = overlap[p] > overlap[best] or (overlap[p] == overlap[best] and held[p] < held[best])
                if held[p] + weights[b] <= most and more:
                    best = p
            held[best] += weights[b]
            if best != old:
                parts[b] = best
                _move(keys, start, end, there, old, best)
    _even_out(ends, keys, parts, weights, sizes, held, there, overlap)
    return parts


@numba.njit(nogil=True, cache=True)
def _even_out(ends, keys, parts, weights, sizes, held, there, overlap):  # type: ignore[no-untyped-def]
    """Moves samples out of parts that are too large, those first that lose least by it, to where there is room or most of it."""
    losses = np.empty(ends.shape[0], np.int64)
    for p in range(sizes.shape[0]):
        if held[p] <= sizes[p]:
            continue
        members = np.flatnonzero(parts == p)
        for m in range(members.shape[0]):
            b = members[m]
            start, end = ends[b - 1] if b else 0, ends[b]
            _look_out(keys, start, end, there, p, overlap)
            elsewhere = np.int32(-1)
            for q in range(sizes.shape[0]):
                if held[q] < sizes[q]:
                    elsewhere = max(elsewhere, overlap[q])
            losses[m] = overlap[p] - elsewhere
        order = np.argsort(losses[: members.shape[0]], kind="mergesort")
        for m in range(members.shape[0]):
            if held[p] <= sizes[p]:
                break
            b = members[order[m]]
            start, end, weight = ends[b - 1] if b else 0, ends[b], weights[b]
            _look_out(keys, start, end, there, p, overlap)
            best, emptiest = -1, -1
            for q in range(sizes.shape[0]):
                if q == p:
                    continue
                if held[q] + weight <= sizes[q] and (best < 0 or overlap[q] > overlap[best]):
                    best = q
                if emptiest < 0 or held[q] < held[emptiest]:
                    emptiest = q
            if best < 0 and held[emptiest] + weight < held[p]:
                best = emptiest
            if best < 0:
                best = p
            parts[b] = best
            held[p] -= weight
            held[best] += weight
            _move(keys, start, end, there, p, best)
