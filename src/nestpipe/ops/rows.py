"""Operations on the rows of a batch: numpy arrays on the host, tensors on a device.

On the host they are numba kernels (`rows_kernels.py`).  On a device they are Triton kernels (`rows_triton.py`) where
Triton runs, and torch operations elsewhere.  None of them makes the host wait for a device, and none adds in an order
that a device may choose: the same arguments give the same bits.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nestpipe.ops import rows_kernels as kernels
from nestpipe.ops.triton_support import kernels_for

Array = Any
"""np.ndarray on the host, Tensor on a device.  All arrays of one call are of one kind."""


def gather(source: Array, index: Array, out: Array) -> None:
    """out[i] = source[index[i]]."""
    if isinstance(source, np.ndarray):
        kernels.gather(source, index, out)
    elif not index.numel():
        return
    elif triton := _triton(source):
        triton.gather(source, index, out)
    else:
        torch.index_select(source, 0, index, out=out)


def copy_rows(source: Array, source_index: Array, target: Array, target_index: Array) -> None:
    """target[target_index[i]] = source[source_index[i]].  No place twice in `target_index`."""
    if isinstance(source, np.ndarray):
        kernels.copy_rows(source, source_index, target, target_index)
    elif source_index.numel() and source.shape[1]:
        triton = _triton(source)
        if triton:
            triton.copy_rows(source, source_index, target, target_index)
        else:
            target.index_copy_(0, target_index.long(), source.index_select(0, source_index))


def add_rows(source: Array, index: Array, target: Array) -> None:
    """target[index[i]] += source[i], for each row in the order of i."""
    if isinstance(source, np.ndarray):
        kernels.scatter_add(source, index, target)
    elif index.numel():
        sorted_index, order = torch.sort(index, stable=True)
        triton = _triton(source)
        if triton:
            triton.add_sorted_rows(source, order, sorted_index, target)
        else:
            add_sorted_rows_reference(source, order, sorted_index, target)


def add_sorted_rows_reference(source: Tensor, order: Tensor, sorted_index: Tensor, target: Tensor) -> None:
    """Sums every run of equal places in order, then adds each sum to its row.

    The number of runs is known on the device only, so there are as many as places: those behind the last one are empty,
    and add zero to the first row, which changes no bit of it.
    """
    places = sorted_index.numel()
    begins = torch.ones_like(sorted_index, dtype=torch.int64)
    begins[1:] = sorted_index[1:] != sorted_index[:-1]
    run = torch.cumsum(begins, 0) - 1
    lengths = torch.zeros_like(run).index_add_(0, run, torch.ones_like(run))
    sums = segment_sums(source.index_select(0, order), lengths)
    rows = sorted_index[:1].long().repeat(places).scatter_(0, run, sorted_index.long())
    target.index_add_(0, rows, sums)


def segment_sums(source: Tensor, lengths: Tensor) -> Tensor:
    """[len(lengths), D]: sums of consecutive rows of `source`, each from the first to the last."""
    if not source.shape[0]:
        return source.new_zeros(lengths.numel(), source.shape[1])
    return torch.segment_reduce(source, "sum", lengths=lengths, axis=0, initial=0, unsafe=True)


def poison(rows: Array, index: Array) -> None:
    """Poisons rows that are still to be filled: a read that comes too early gets NaN, and the run stops."""
    if isinstance(rows, np.ndarray):
        kernels.poison(rows, index)
    elif index.numel():
        rows[:, 0].index_fill_(0, index.long(), torch.nan)


def zero(rows: Array) -> None:
    (torch.from_numpy(rows) if isinstance(rows, np.ndarray) else rows).zero_()  # twice as fast as numpy's


def scale(rows: Array, factor: float) -> None:
    if isinstance(rows, np.ndarray):
        kernels.scale(rows, np.array([factor], rows.dtype))
    else:
        rows.mul_(factor)


def sum_of_squares(rows: Array) -> float | Tensor:
    """In float64.  Not finite if and only if a number is not: squares of float32 cannot overflow.

    On a device a tensor of one number, so that nobody waits.
    """
    if isinstance(rows, np.ndarray):
        return float(kernels.sum_of_squares(rows))
    triton = _triton(rows)
    return triton.sum_of_squares(rows) if triton and rows.dim() == 2 else torch.sum(rows.double().square())


def _triton(like: Tensor) -> ModuleType | None:
    return kernels_for(like, "rows_triton")
