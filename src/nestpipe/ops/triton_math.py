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


@triton.jit
def row_squares(rows, i, count, dim, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """[ROWS]: the sums of the squares of rows i, in the order of `row_squares.py`: 4 vectors of WIDTH numbers side by
    side, what is left of a row in fours, the last numbers one by one."""
    number = rows.dtype.element_ty
    there = i < count
    whole = dim // (4 * WIDTH) * (4 * WIDTH)
    fours = dim // 4 * 4
    at = rows + i[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    first = tl.zeros((ROWS, WIDTH), number)
    second = tl.zeros((ROWS, WIDTH), number)
    third = tl.zeros((ROWS, WIDTH), number)
    fourth = tl.zeros((ROWS, WIDTH), number)
    for d in range(0, whole, 4 * WIDTH):
        first += _square(at + d, there[:, None])
        second += _square(at + d + WIDTH, there[:, None])
        third += _square(at + d + 2 * WIDTH, there[:, None])
        fourth += _square(at + d + 3 * WIDTH, there[:, None])
    total = _add_halves(first + second + third + fourth, ROWS, WIDTH)
    lane = tl.arange(0, 4)[None, :]
    at = rows + i[:, None] * stride + lane
    rest = tl.where(lane == 0, total[:, None], tl.zeros((ROWS, 4), number))
    for d in range(whole, fours, 4):
        rest += _square(at + d, there[:, None])
    total = _add_halves(rest, ROWS, 4)
    for d in range(fours, dim):
        total += _square(rows + i * stride + d, there)
    return total


@triton.jit
def _square(at, there):  # type: ignore[no-untyped-def]
    x = tl.load(at, mask=there, other=0.0)
    return x * x


@triton.jit
def _add_halves(x, ROWS: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """[ROWS]: halves of the rows of x [ROWS, WIDTH] are added to each other until one number is left.  WIDTH: 4 or 8.

    Two numbers have one sum, so `tl.sum` over a pair has one result.
    """
    if WIDTH == 8:
        x = tl.sum(tl.reshape(x, (ROWS, 2, 4)), 1)
    x = tl.sum(tl.reshape(x, (ROWS, 2, 2)), 1)
    return tl.sum(x, 1)
