"""`prefetch`, the one instruction that numba cannot express.  LLVM lowers it on every CPU.

Rows and index entries lie all over memory.  Without prefetch a kernel waits for one cache miss after another.

Measured 2026-11-17 on 2 cores of an EPYC with 32 MB of L3, CPU time of one thread, both versions taking turns in one
process, 30 to 400 rounds each.  Time without prefetch / time with it, medians (quartiles), caches filled with other
data before every call:

    pool, pool_backward         2048 x 26 rows of 64 floats      1.97 (1.87 to 2.13), 1.99 (1.88 to 2.08)
    gather                      20,000 of 1,000,000 rows of 64   1.32 (1.17 to 1.45); rows of 16: 1.63 (1.38 to 1.78)
    HashIndex.find, insert      50,000 of 2,000,000 keys         1.19 (1.06 to 1.25), 1.77 (1.69 to 1.89)
    disk locate, decode         50,000 rows; 20,000 records      1.48 (1.42 to 1.63), 1.05 (1.03 to 1.08)
    disk, count touches         50,000 of 5,000,000 rows         1.14 (1.03 to 1.28)
    snapshot, note changes      50,000 of 5,000,000 rows         1.31 (1.17 to 1.58)
    dedup of dense keys         bench/dedup.py, "in turns"       1.08 to 1.13; with warm caches 0.95 to 1.01

A hint to fetch for writing made no difference anywhere (0.99 to 1.02), so there is one kind of prefetch.
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
