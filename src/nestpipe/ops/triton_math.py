"""What several Triton kernels need: tiles of rows, IEEE division and roots, sums in an order of ours.

A reduction of Triton's own (`tl.sum`) adds in an order that depends on the device and on how a tile is laid out over
its threads.  `tree_sum` adds neighbours, then neighbours of sums, and so on: the same bits on every device, since two
numbers have one sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
"""Numbers that a program of an elementwise kernel works on at once."""


def tile_of(dim: int, most: int = 128) -> tuple[int, int]:
    """Rows and columns of a tile, powers of two: no wider than `dim` needs, nor than `most`."""
    columns = min(triton.next_power_of_2(max(1, dim)), most)
    return max(1, TILE // columns), columns


def wide_type(like: Tensor) -> tl.dtype:
    """The type of intermediate results that the host's kernels have in float64.  An Ascend NPU has no float64."""
    return tl.float32 if like.device.type == "npu" and like.dtype != torch.float64 else tl.float64


@triton.jit
def tile(count, dim, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of this program: its rows [ROWS], its columns [COLUMNS], and which of [ROWS, COLUMNS] there are."""
    i = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    return i, d, (i < count)[:, None] & (d < dim)[None, :]


@triton.jit
def divide(x, y):  # type: ignore[no-untyped-def]
    """x / y, rounded as IEEE 754 says.  (`/` alone is approximate in float32.)"""
    if x.dtype == tl.float64:
        return x / y
    else:
        return tl.div_rn(x, y)


@triton.jit
def root(x):  # type: ignore[no-untyped-def]
    """The square root of x, rounded as IEEE 754 says."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def tree_sum(x, ROWS: tl.constexpr, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """[ROWS]: the sums of the rows of x [ROWS, 2 ** LEVELS], neighbours first."""
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (ROWS, 2 ** (LEVELS - level - 1), 2)), 2)
    return tl.reshape(x, (ROWS,))
