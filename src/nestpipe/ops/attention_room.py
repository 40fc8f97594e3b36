"""The room that attention by tiles works in, and copies into and out of it, transposed too.

A room is a tuple of flat arrays, each of which begins at a cache line.  Matrices lie in them row by row, with `step` numbers
from row to row.
"""

from __future__ import annotations

from typing import Any

import numba
from torch import Tensor

LANES = 16
"""Numbers of a cache line, of float32.  Rows of a part begin at multiples of it, and transposed copies go by so many rows."""


def make_room(like: Tensor, tokens: int, rows: int, columns: int, forward: bool) -> tuple[Any, ...]:
    """For `attend` or `attend_backward` of histories of at most so many tokens, of the width and dtype of `like`."""
    step = room_step(like.shape[1])
    history, tile, few = filled_up(tokens, columns) * step, rows * columns, rows * step
    if forward:
        numbers = (history, history, 2 * tile, tile, few, 3 * few)
    else:
        numbers = (*(5 * [history]), 2 * tile, tile, tile, 2 * tile, *(5 * [few]), *(2 * [2 * few]))
    return tuple(like.new_empty(number).numpy() for number in numbers)


@numba.njit(nogil=True, error_model="numpy")
def filled_up(count, grain):  # type: ignore[no-untyped-def]
    """The least multiple of `grain` that is not below `count`."""
    return (count + grain - 1) // grain * grain


@numba.njit(nogil=True, error_model="numpy")
def room_step(width):  # type: ignore[no-untyped-def]
    """Numbers from one row to the next, for rows of this width."""
    return filled_up(width, LANES)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def copy_rows(source, first, count, column, width, tall, to, at, step):  # type: ignore[no-untyped-def]
    """to [tall, width] from `at` on: `count` rows of `source` from (first, column) on, then rows of zeros."""
    for i in range(count):
        x, y = source[first + i, column : column + width], to[at + i * step : at + i * step + width]
        for j in range(width):
            y[j] = x[j]
    for i in range(count, tall):
        to[at + i * step : at + i * step + width] = 0


@numba.njit(nogil=True, cache=True, error_model="numpy")
def copy_out(part, at, step, count, to, first, column, width):  # type: ignore[no-untyped-def]
    """The other way: `count` rows of a part from `at` on into `to`."""
    for i in range(count):
        x, y = part[at + i * step : at + i * step + width], to[first + i, column : column + width]
        for j in range(width):
            y[j] = x[j]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def copy_transposed(source, first, count, column, width, wide, to, at, step):  # type: ignore[no-untyped-def]
    """to [width, wide] from `at` on: as `copy_rows`, with rows and columns exchanged."""
    for low in range(0, count, LANES):
        some = min(LANES, count - low)
        for j in range(width):
            y = to[at + j * step + low : at + j * step + low + some]
            if some == LANES:
                for i in range(LANES):
                    y[i] = source[first + low + i, column + j]
            else:
                for i in range(some):
                    y[i] = source[first + low + i, column + j]
    if count < wide:
        for j in range(width):
            to[at + j * step + count : at + j * step + wide] = 0


@numba.njit(nogil=True, cache=True, error_model="numpy")
def copy_tiles_transposed(source, first, count, columns, grain, to, step):  # type: ignore[no-untyped-def]
    """`count` rows of `source` as tiles [width, columns], one after another, each with room for `step` rows."""
    for left in range(0, count, columns):
        c = min(columns, count - left)
        copy_transposed(source, first + left, c, 0, source.shape[1], filled_up(c, grain), to, left * step, columns)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def copy_tiles_back(part, count, columns, step, to, first):  # type: ignore[no-untyped-def]
    """The other way: `count` rows of `to` from tiles."""
    for left in range(0, count, columns):
        for low in range(left, min(count, left + columns), LANES):
            some = min(LANES, count - low, left + columns - low)
            for j in range(to.shape[1]):
                x = part[left * step + j * columns + low - left :]
                for i in range(some):
                    to[first + low + i, j] = x[i]
