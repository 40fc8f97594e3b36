"""Instructions that Python has no words for, given to numba.  LLVM lowers them on every CPU."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic


@intrinsic
def trailing_zeros(typing_context: Any, x: Any) -> Any:
    """The number of zero bits below the lowest set bit of a uint64 that is not 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(types.uint64), generate


def _prefetch(context: Any, builder: Any, signature: Any, arguments: Any, write: int) -> Any:
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
    builder.call(prefetch, [address, flag(write), flag(2), flag(1)])  # keep in L2, data
    return context.get_dummy_value()


@intrinsic
def prefetch_to_write(typing_context: Any, array: Any, at: Any) -> Any:
    """Asks for the cache line of element `at` (counted flat), which will soon be written.  Stores leave the core in order, so
    one that misses holds up all behind it; lines asked for ahead arrive side by side."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _prefetch(context, builder, signature, arguments, 1)

    return types.void(array, types.uint64), generate


@intrinsic
def prefetch_to_read(typing_context: Any, array: Any, at: Any) -> Any:
    """Asks for the cache line of element `at` (counted flat), which will soon be read."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _prefetch(context, builder, signature, arguments, 0)

    return types.void(array, types.uint64), generate


TILE_BYTES = 128
"""Of a row, that `sum_scaled_rows` takes at a time: four registers of AVX2 or eight of NEON."""


@intrinsic
def sum_scaled_rows(
    typing_context: Any,
    scales: Any,
    scale_at: Any,
    rows: Any,
    row_at: Any,
    stride: Any,
    count: Any,
    out: Any,
    out_at: Any,
) -> Any:
    """out[out_at:] = the sum over j < count of scales[scale_at + j] * rows[row_at + j * stride:], for one tile, j by j; and the
    same for the next `count` scales, into out[out_at + stride:].

    All arrays are of one kind of floats and counted flat.  The sums stay in registers: written as a loop, every step would load
    and store them, since numba cannot know that arrays do not overlap.  Two at a time, because one alone would wait for itself.
    """
    lanes = TILE_BYTES // 4 // (scales.dtype.bitwidth // 8)
    registers = 4

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args

        def start_of(array: int) -> Any:
            """Where an array is read or written first: its place stands behind it among the arguments."""
            data = context.make_array(kinds[array])(context, builder, arguments[array]).data
            return builder.gep(data, [arguments[array + 1]])

        first_scale, first_row, target = start_of(0), start_of(2), start_of(6)
        vector, long, short = ir.VectorType(first_scale.type.pointee, lanes), ir.IntType(64), ir.IntType(32)
        name = f"llvm.fmuladd.v{lanes}f{kinds[0].dtype.bitwidth}"
        add = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector, [vector] * 3), name)
        sums = [
            [cgutils.alloca_once_value(builder, ir.Constant(vector, None)) for _ in range(registers)] for _ in range(2)
        ]
        unset = ir.Constant(vector, ir.Undefined)

        def at(start: Any, register: int) -> Any:
            return builder.bitcast(builder.gep(start, [long(register * lanes)]), vector.as_pointer())

        def everywhere(scale: Any) -> Any:
            one = builder.insert_element(unset, builder.load(scale), short(0))
            return builder.shuffle_vector(one, unset, ir.Constant(ir.VectorType(short, lanes), [0] * lanes))

        with cgutils.for_range(builder, arguments[5], intp=long) as loop:
            scale = builder.gep(first_scale, [loop.index])
            scales_here = [everywhere(scale), everywhere(builder.gep(scale, [arguments[5]]))]
            row = builder.gep(first_row, [builder.mul(loop.index, arguments[4])])
            for register in range(registers):
                part = builder.load(at(row, register), align=1)
                for scale_here, totals in zip(scales_here, sums):
                    total = totals[register]
                    builder.store(builder.call(add, [scale_here, part, builder.load(total)]), total)
        for start, totals in zip((target, builder.gep(target, [arguments[4]])), sums):
            for register, total in enumerate(totals):
                builder.store(builder.load(total), at(start, register), align=1)
        return context.get_dummy_value()

    number = types.int64
    return types.void(scales, number, rows, number, number, number, out, number), generate
