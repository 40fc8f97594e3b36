"""`prefetch`, an instruction that numba has no function for.  LLVM lowers it on every CPU.

Rows and index entries lie all over memory.  Without prefetch a kernel waits for one cache miss after another.

`python bench/kernels.py`, 2026-11-17, one thread of an EPYC with 32 MB of L3, caches cold.  Time without / with it,
median (quartiles) of 60 turns:

    pool, 2048 x 26 rows of 64 floats           2.63 (2.21 to 2.78)
    pool_backward, the same                     2.57 (2.34 to 2.67)
    gather, 20,000 of 1,000,000 rows of 64      1.53 (1.40 to 1.64)
    gather, 20,000 of 1,000,000 rows of 16      1.19 (1.06 to 1.37)
    HashIndex.find, 50,000 of 2,000,000 keys    1.61 (1.32 to 1.67)
    HashIndex.insert, the same known keys       1.66 (1.62 to 1.71)
    disk: locate 50,000 of 5,000,000 rows       2.12 (1.72 to 2.25)
    snapshot: note changes of 50,000 rows       1.50 (1.37 to 1.63)
    dedup of bench/dedup.py's dense keys        1.15 (1.06 to 1.28) "offset", 1.04 (0.95 to 1.25) "plain"

A hint to fetch for writing made no difference in any of them (0.99 to 1.02), so there is one kind of prefetch.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic


@intrinsic
def prefetch(typing_context: Any, array: Any, at: Any) -> Any:
    """Asks for the cache line of element `at` (uint64, counted flat) of a C-contiguous array.  Changes no result."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        instruction = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        builder.call(instruction, [address, flag(0), flag(2), flag(1)])  # to read, keep in L2, data
        return context.get_dummy_value()

    return types.void(array, types.uint64), generate
