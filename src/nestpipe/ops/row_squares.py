"""The sum of the squares of a row, added in one order on every CPU and every device.

A compiler that may reorder a sum chooses the order by the CPU: one with AVX-512 got other bits than one with AVX2.  So the
order is written down here, as vector instructions that any CPU can lower.  It is the one that compilers chose for AVX2:

1. 4 vectors of 32 bytes are added up side by side, over as many whole groups of 4 vectors as a row has.  Then the second,
   third and fourth are added to the first, and its halves to each other until one number is left.
2. What is left of the row, 4 numbers at a time, in the same way: one vector of 4, which begins with the sum so far.
3. The last numbers one by one.

`row_steps_triton.py` and `row_steps.py` have the same order for devices.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic, overload


def _add_up(builder: Any, vector: Any, width: int) -> Any:
    """Halves are added to each other until one number is left."""
    index = ir.IntType(32)
    while width > 1:
        width //= 2
        low, high = (ir.Constant(ir.VectorType(index, width), list(range(at, at + width))) for at in (0, width))
        nothing = ir.Constant(vector.type, ir.Undefined)
        vector = builder.fadd(
            builder.shuffle_vector(vector, nothing, low), builder.shuffle_vector(vector, nothing, high)
        )
    return builder.extract_element(vector, index(0))


@intrinsic(prefer_literal=True)
def _add_squares(
    typing_context: Any, rows: Any, i: Any, begin: Any, end: Any, total: Any, width: Any, vectors: Any
) -> Any:
    """`total` plus the squares of columns begin to end of row i, a multiple of width * vectors numbers.

    Numbers are converted to the type of `total` first.  The columns of a row lie side by side.
    """
    size, parts = width.literal_value, vectors.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array, i, begin, end, total = arguments[:5]
        made = context.make_array(signature.args[0])(context, builder, array)
        stored, number, index = made.data.type.pointee, total.type, ir.IntType(32)
        wide = ir.VectorType(number, size)
        bytes_before = builder.mul(i, builder.extract_value(made.strides, 0))
        row = builder.bitcast(cgutils.pointer_add(builder, made.data, bytes_before), stored.as_pointer())
        nothing = ir.Constant(wide, [0.0] * size)
        sums = [cgutils.alloca_once_value(builder, nothing) for _ in range(parts)]
        builder.store(builder.insert_element(nothing, total, index(0)), sums[0])
        with cgutils.for_range_slice(builder, begin, end, begin.type(size * parts), inc=True) as (column, _):
            for part, place in enumerate(sums):
                at = builder.gep(row, [builder.add(column, begin.type(part * size))])
                value = builder.load(builder.bitcast(at, ir.VectorType(stored, size).as_pointer()))
                value.align = signature.args[0].dtype.bitwidth // 8
                if stored != number:
                    value = builder.fpext(value, wide)
                builder.store(builder.fadd(builder.load(place), builder.fmul(value, value)), place)
        joined = builder.load(sums[0])
        for place in sums[1:]:
            joined = builder.fadd(joined, builder.load(place))
        return _add_up(builder, joined, size)

    return total(rows, types.intp, types.intp, types.intp, total, width, vectors), generate


def _first_part(rows: Any, i: Any, zero: Any) -> Any:
    """(sum, columns in it): vectors of 32 bytes, 4 side by side."""
    raise NotImplementedError("for numba kernels")


@overload(_first_part, inline="always")
def _first_part_of(rows, i, zero):  # type: ignore[no-untyped-def]
    if zero == types.float32:

        def first_part(rows, i, zero):  # type: ignore[no-untyped-def]
            end = rows.shape[1] // 32 * 32
            return (_add_squares(rows, i, 0, end, zero, 8, 4) if end else zero), end
    else:

        def first_part(rows, i, zero):  # type: ignore[no-untyped-def]
            end = rows.shape[1] // 16 * 16
            return (_add_squares(rows, i, 0, end, zero, 4, 4) if end else zero), end

    return first_part


@numba.njit(nogil=True, cache=True)
def row_sum_of_squares(rows, i, zero):  # type: ignore[no-untyped-def]
    """In the type of `zero`."""
    dim = rows.shape[1]
    total, whole = _first_part(rows, i, zero)
    fours = dim // 4 * 4
    if whole < fours:
        total = _add_squares(rows, i, whole, fours, total, 4, 1)
    for d in range(fours, dim):
        number = type(zero)(rows[i, d])
        total += number * number
    return total
