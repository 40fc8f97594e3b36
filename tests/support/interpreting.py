"""Tools around Triton's interpreter: bounds of every access, programs in another order, poisoned surroundings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor


@contextmanager
def within_bounds() -> Iterator[None]:
    """A load or store that is not of an element of a tensor which the kernel was given raises an error."""
    from triton.runtime import interpreter

    given: list[np.ndarray] = []
    builder = type(interpreter.interpreter_builder)
    run = interpreter.GridExecutor.__call__

    def run_with_bounds(self: Any, *args: Any, **options: Any) -> None:
        tensors = [value for value in (*args, *options.values()) if isinstance(value, Tensor)]
        given[:] = [np.unique(np.concatenate([_addresses(tensor) for tensor in tensors]))]
        run(self, *args, **options)

    def checked(access: Callable[..., Any], mask_at: int) -> Callable[..., Any]:
        def wrapped(self: Any, pointers: Any, *args: Any) -> Any:
            mask = np.broadcast_to(args[mask_at].data, pointers.data.shape).astype(bool)
            if not np.isin(pointers.data[mask], given[0]).all():
                raise IndexError(f"{access.__name__} beyond every tensor")
            return access(self, pointers, *args)

        return wrapped

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(interpreter.GridExecutor, "__call__", run_with_bounds))
        for name, mask_at in (("create_masked_load", 0), ("create_masked_store", 1)):
            stack.enter_context(mock.patch.object(builder, name, checked(getattr(builder, name), mask_at)))
        yield


def _addresses(tensor: Tensor) -> np.ndarray:
    """Of every element."""
    places = np.zeros(1, np.int64)
    for size, stride in zip(tensor.shape, tensor.stride()):
        places = np.add.outer(places, np.arange(size) * stride).ravel()
    return (tensor.data_ptr() + places * tensor.element_size()).astype(np.uint64)


@contextmanager
def shuffled(seed: int) -> Iterator[None]:
    """The programs of a grid run in a random order."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    run = builder.set_grid_idx
    orders: dict[tuple[int, ...], np.ndarray] = {}

    def run_another(*index: int) -> None:
        grid = builder.grid_dim
        order = orders.setdefault(grid, np.random.default_rng(seed).permutation(math.prod(grid)))
        run(*map(int, np.unravel_index(order[np.ravel_multi_index(index, grid)], grid)))

    with mock.patch.object(builder, "set_grid_idx", run_another):
        yield


def same_bits_in_any_order(function: Callable[[], list[Tensor]], seeds: int = 3) -> None:
    """The function's results do not depend on the order of a kernel's programs."""
    wanted = function()
    for seed in range(seeds):
        with shuffled(seed):
            found = function()
        assert all(same_bits(a, b) for a, b in zip(wanted, found, strict=True))


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    """Equal, with 0.0 and -0.0 told apart; a NaN is as good as another."""
    same = (found == wanted) & (found.signbit() == wanted.signbit()) | found.isnan() & wanted.isnan()
    return found.dtype == wanted.dtype and found.shape == wanted.shape and bool(same.all())


class Surrounded:
    """A copy of a tensor in the middle of a larger one that is full of NaN, or of numbers that are no index."""

    def __init__(self, tensor: Tensor, columns: bool = True, by: int = 3) -> None:
        self._poison = math.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max - 1
        beside = [by] + [by if columns else 0] * (tensor.dim() - 1)
        self._all = torch.full([s + 2 * b for s, b in zip(tensor.shape, beside)], self._poison, dtype=tensor.dtype)
        self._middle = tuple(slice(b, b + s) for s, b in zip(tensor.shape, beside))
        self.tensor = self._all[self._middle]
        self.tensor.copy_(tensor)

    def intact(self) -> bool:
        """Whether nothing around the tensor was written."""
        around = self._all.clone()
        around[self._middle] = self._poison
        return same_bits(around, torch.full_like(around, self._poison))
