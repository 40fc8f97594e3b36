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
