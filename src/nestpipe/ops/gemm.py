"""Matrix products inside numba kernels, by what torch's library brings.

A kernel that multiplies a thousand small tiles cannot go back to Python for each.  torch's library has two functions for
it.  `brgemm` is oneDNN's, made at run time for one shape: it is quick at the sizes of a tile, wants AVX-512 and float32, and
an element's bits depend on the order of its terms alone.  `sgemm_` and `dgemm_` have the interface that every BLAS has; their
bits may depend on shapes, and on where a matrix begins in memory.  None is part of torch's interface, so they are looked up
by name and tried once; where they are missing or wrong, `tile_gemm` is None and callers go through `torch.matmul`.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import numba
import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic

SWITCH = "NESTPIPE_GEMM"
"""Environment variable: "blas" leaves `brgemm` alone, "torch" all of the library's own functions."""
NAMES = {torch.float32: "sgemm_", torch.float64: "dgemm_"}
TILED = "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb"
"""brgemm(m, n, k, steps of a, b and c, whether to add to c, a, b, c, whether b is packed) of at::native::cpublas, for float32."""
ONEDNN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Environment variables that take instructions away from oneDNN.  `brgemm` without AVX-512 ends the process."""
CELLS = 8
"""Whole numbers that `multiply` needs room for."""
Gemm = tuple[int, bool]
"""Where a product is in memory, and whether it is `brgemm`."""


@functools.cache
def tile_gemm(dtype: torch.dtype) -> Gemm | None:
    """The quickest product of this dtype that multiplies as it should.  None: there is none."""
    chosen = os.environ.get(SWITCH)
    tiled = None
    if dtype == torch.float32 and chosen not in ("blas", "torch") and _has_avx512():
        tiled = found(TILED, True, dtype)
    return tiled or blas_gemm(dtype)


def blas_gemm(dtype: torch.dtype) -> Gemm | None:
    """The BLAS, for matrices of many shapes: `brgemm` keeps code for every shape that it has seen."""
    if os.environ.get(SWITCH) == "torch" or dtype not in NAMES:
        return None
    return found(NAMES[dtype], False, dtype)


@functools.cache
def found(name: str, tiled: bool, dtype: torch.dtype) -> Gemm | None:
    """The function of this name, if it is there and multiplies."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return None
    return (address, tiled) if address and _multiplies((address, tiled), dtype) else None


def _has_avx512() -> bool:
    """Whether torch and oneDNN use it."""
    limited = any(name in os.environ for name in ONEDNN_LIMITS)
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not limited


def _multiplies(gemm: Gemm, dtype: torch.dtype) -> bool:
    """Whether it gives known products of parts of larger matrices, with and without adding to what is there."""
    draw = np.random.default_rng(0)
    kind = np.float32 if dtype == torch.float32 else np.float64
    a, b = draw.integers(-3, 4, (2, 7, 9)).astype(kind)  # whole numbers: products are exact
    for m, n, k, add in ((5, 3, 4, True), (7, 9, 7, False), (1, 1, 1, True), (2, 8, 6, True)):
        found = np.ones((7, 9), kind)
        _multiply_once(gemm, (m, n, k), a, b, add, found)
        wanted = np.ones((7, 9), kind)
        wanted[:m, :n] = add + a[:m, :k] @ b[:k, :n]
        if not np.array_equal(found, wanted):
            return False
    return True


@intrinsic
def _call_blas(typingctx, address, arguments):  # type: ignore[no-untyped-def]
    """Calls the function at `address` with the pointers in a tuple."""

    def generate(context, builder, signature, given):  # type: ignore[no-untyped-def]
        pointer = ir.IntType(8).as_pointer()
        function = ir.FunctionType(ir.VoidType(), [pointer] * len(signature.args[1]))
        values = [builder.inttoptr(builder.extract_value(given[1], i), pointer) for i in range(len(signature.args[1]))]
        builder.call(builder.inttoptr(given[0], function.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(address, arguments), generate


@intrinsic
def _call_tiled(typingctx, address, sizes, add, pointers):  # type: ignore[no-untyped-def]
    """Calls `brgemm` at `address`: six whole numbers, whether to add, and the addresses of a, b and c."""

    def generate(context, builder, signature, given):  # type: ignore[no-untyped-def]
        whole, flag, pointer = ir.IntType(64), ir.IntType(32), ir.IntType(8).as_pointer()
        function = ir.FunctionType(ir.VoidType(), [whole] * 6 + [flag] + [pointer] * 3 + [flag])
        values = [builder.extract_value(given[1], i) for i in range(6)]
        values.append(builder.zext(context.cast(builder, given[2], signature.args[2], types.boolean), flag))
        values += [builder.inttoptr(builder.extract_value(given[3], i), pointer) for i in range(3)]
        values.append(ir.Constant(flag, 0))
        builder.call(builder.inttoptr(given[0], function.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(address, types.UniTuple(types.int64, 6), types.boolean, pointers), generate


@numba.njit(nogil=True, error_model="numpy")
def prepared(gemm, like):  # type: ignore[no-untyped-def]
    """What `multiply` takes first: the product, and room of its own.  `like` has the dtype."""
    cells = np.empty(CELLS, np.int64)
    cells[6] = 78  # the letter for "as it is"
    return gemm[0], gemm[1], cells, np.empty(2, like.dtype)


@numba.njit(nogil=True, error_model="numpy")
def multiply(products, m, n, k, a, a_step, b, b_step, add, c, c_step):  # type: ignore[no-untyped-def]
    """C [m, n] = A [m, k] B [k, n], or C += A B.  Matrices lie row by row.  a, b and c are addresses.

    A BLAS counts columns first, so it is asked for C' = B' A'.  It is given CELLS int64, which are right for either width
    of a library's integers.
    """
    address, tiled, cells, factors = products
    if tiled:
        _call_tiled(address, (m, n, k, a_step, b_step, c_step), add, (a, b, c))
        return
    cells[0], cells[1], cells[2], cells[3], cells[4], cells[5] = n, m, k, b_step, a_step, c_step
    factors[0], factors[1] = 1, 1 if add else 0
    at, by = cells.ctypes.data, factors.ctypes.data
    one, two = (b, at + 24), (a, at + 32)
    _call_blas(address, (at + 48, at + 48, at, at + 8, at + 16, by, *one, *two, by + factors.itemsize, c, at + 40))


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _multiply_once(gemm, shape, a, b, add, c):  # type: ignore[no-untyped-def]
    products = prepared(gemm, a)
    m, n, k = shape
    steps = a.strides[0] // a.itemsize, b.strides[0] // b.itemsize, c.strides[0] // c.itemsize
    at = a.ctypes.data, b.ctypes.data, c.ctypes.data
    multiply(products, m, n, k, at[0], steps[0], at[1], steps[1], add, at[2], steps[2])
