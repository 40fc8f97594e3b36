"""Sums that CUDA makes by atomic additions: with `shuffle_atomics` their terms are added in a random order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nestpipe.device.sim.ops.schemas import aten


def _order(count: int, seed: int) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def _index_add(func: Any, seed: int, into: Any, dim: int, index: Any, source: Any, **kwargs: Any) -> Any:
    if index.dim() == 0:
        return func(into, dim, index, source, **kwargs)
    order = _order(index.numel(), seed)
    return func(into, dim, index[order], source.index_select(dim, order), **kwargs)


def _scatter_add(func: Any, seed: int, into: Any, dim: int, index: Any, source: Any, *rest: Any, **kwargs: Any) -> Any:
    if index.dim() == 0 or index.numel() == 0:
        return func(into, dim, index, source, *rest, **kwargs)
    order = _order(index.shape[dim], seed)
    return func(into, dim, index.index_select(dim, order), source.index_select(dim, order), *rest, **kwargs)


def _index_put(func: Any, seed: int, into: Any, indices: Any, values: Any, accumulate: bool = False, *rest: Any) -> Any:
    given = [index for index in indices if index is not None]
    leading = len(given) == len(indices) and all(index.dtype != torch.bool for index in given)
    if not accumulate or not leading:
        return func(into, indices, values, accumulate, *rest)
    given = torch.broadcast_tensors(*given)
    shape = (*given[0].shape, *into.shape[len(given) :])
    terms = values.expand(shape).reshape(given[0].numel(), *into.shape[len(given) :])
    order = _order(given[0].numel(), seed)
    return func(into, [index.reshape(-1)[order] for index in given], terms[order], True, *rest)


def _embedding(func: Any, seed: int, grad: Any, indices: Any, *rest: Any) -> Any:
    order = _order(indices.numel(), seed)
    return func(grad.reshape(indices.numel(), -1)[order], indices.reshape(-1)[order], *rest)


_ATOMIC: dict[Any, Callable[..., Any]] = {
    aten.index_add_.default: _index_add,
    aten.index_add.default: _index_add,
    aten.scatter_add_.default: _scatter_add,
    aten.scatter_add.default: _scatter_add,
    aten.index_put_.default: _index_put,
    aten.index_put.default: _index_put,
    aten._index_put_impl_.default: _index_put,
    aten.embedding_dense_backward.default: _embedding,
}


def shuffled(func: Any, args: list[Any], kwargs: dict[str, Any], seed: int) -> Callable[[], Any] | None:
    """The operation with its terms in an order drawn from `seed`; None if it is not made of atomic additions."""
    run = _ATOMIC.get(func)
    return None if run is None else lambda: run(func, seed, *args, **kwargs)
