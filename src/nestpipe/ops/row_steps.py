"""One step of a sparse optimizer on every row of a buffer: numpy arrays on the host, tensors on a device.

`values` and `grads` are [R, D].  `state` is [R, S]; a step uses its first columns and leaves the others alone.  On the
host steps are numba kernels (`row_steps_kernels.py`).  On a device they are Triton kernels (`row_steps_triton.py`), or
the torch operations below.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from nestpipe.ops import row_steps_kernels as kernels
from nestpipe.ops.rows import Array
from nestpipe.ops.triton_support import kernels_for


def sgd(values: Array, grads: Array, lr: float) -> None:
    if isinstance(values, np.ndarray):
        kernels.sgd(values, grads, np.array([lr], values.dtype))
    elif triton := _triton(values):
        triton.sgd(values, grads, lr)
    else:
        values.sub_(grads * lr)


def rowwise_adagrad(values: Array, state: Array, grads: Array, lr: float, eps: float, scale: float = 1.0) -> None:
    """`scale`: a factor on the mean squared gradient that is added to a row's sum."""
    if isinstance(values, np.ndarray):
        kernels.rowwise_adagrad(values, state, grads, np.array([lr, eps, scale], values.dtype))
    elif triton := _triton(values):
        triton.rowwise_adagrad(values, state, grads, lr, eps, scale)
    else:
        sums = state[:, :1]
        sums.add_(scale * (_row_sums(grads.square())[:, None] / values.shape[1]))
        values.sub_((lr / (sums.sqrt() + eps)) * grads)


def adagrad(values: Array, state: Array, grads: Array, lr: float, eps: float) -> None:
    if isinstance(values, np.ndarray):
        kernels.adagrad(values, state, grads, np.array([lr, eps], values.dtype))
    elif triton := _triton(values):
        triton.adagrad(values, state, grads, lr, eps)
    else:
        sums = state[:, : values.shape[1]]
        sums.add_(grads * grads)
        values.sub_(lr * (grads / (sums.sqrt() + eps)))


def adam(values: Array, state: Array, grads: Array, step_size: float, keep1: float, keep2: float, eps: float) -> None:
    """`keep1`, `keep2`: shares of the new gradient in the two moments, 1 - beta."""
    if isinstance(values, np.ndarray):
        kernels.adam(values, state, grads, np.array([step_size, keep1, keep2, eps], values.dtype))
    elif triton := _triton(values):
        triton.adam(values, state, grads, step_size, keep1, keep2, eps)
    else:
        dim = values.shape[1]
        first, second = state[:, :dim], state[:, dim : 2 * dim]
        first.add_((grads - first) * keep1)
        second.add_((grads * grads - second) * keep2)
        values.sub_(step_size * (first / (second.sqrt() + eps)))


def keep_rows(values: Tensor, state: Tensor, before: tuple[Tensor, Tensor], kept: Tensor) -> None:
    """On a device: where `kept` [R] is True, values and state become again what they were before a step."""
    for now, then in zip((values, state), before):
        now.copy_(torch.where(kept[:, None], then, now))


def _row_sums(x: Tensor) -> Tensor:
    """[R]: the sums of the rows of x [R, D], in the order of `row_squares.py`."""
    width = 32 // x.element_size()
    dim = x.shape[1]
    whole, fours = dim // (4 * width) * 4 * width, dim // 4 * 4
    sums = x.new_zeros(len(x), 4 * width)
    for at in range(0, whole, 4 * width):
        sums += x[:, at : at + 4 * width]
    first, second, third, fourth = sums.split(width, 1)
    total = _add_up(first + second + third + fourth)
    rest = x.new_zeros(len(x), 4)
    rest[:, 0] = total
    for at in range(whole, fours, 4):
        rest += x[:, at : at + 4]
    total = _add_up(rest)
    for at in range(fours, dim):
        total = total + x[:, at]
    return total


def _add_up(x: Tensor) -> Tensor:
    """Halves are added to each other until one number a row is left."""
    while x.shape[1] > 1:
        low, high = x.chunk(2, 1)
        x = low + high
    return x[:, 0]


def _triton(like: Tensor) -> ModuleType | None:
    return kernels_for(like, "row_steps_triton")
