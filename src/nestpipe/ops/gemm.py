"""Matrix products inside numba kernels, by the BLAS that torch brings.

A kernel that multiplies a thousand small tiles cannot go back to Python for each.  torch's library has `sgemm_` and
`dgemm_` in it, with the interface that every BLAS has.  But they are no part of torch's interface, so they are looked up
by name and tried once; where they are missing or wrong, `gemm_address` is 0 and callers go through `torch.bmm`.
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
"""Environment variable: "torch" leaves the library's own functions alone."""
NAMES = {torch.float32: "sgemm_", torch.float64: "dgemm_"}
CELLS = 8
"""Whole numbers that `multiply` needs room for."""


@functools.cache
def gemm_address(dtype: torch.dtype) -> int:
    """Where the product of this dtype is in memory; 0 if there is none that multiplies as it should."""
    if os.environ.get(SWITCH) == "torch" or dtype not in NAMES:
        return 0
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        address = ctypes.cast(getattr(library, NAMES[dtype]), ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0
    return address if address and _multiplies(address, dtype) else 0


def _multiplies(address: int, dtype: torch.dtype) -> bool:
    """Whether it gives known products, with and without transposing, of parts of larger matrices."""
    draw = np.random.default_rng(0)
    kind = np.float32 if dtype == torch.float32 else np.float64
    a, b = draw.integers(-3, 4, (2, 7, 9)).astype(kind)  # whole numbers: products are exact
    for left, right in ((False, False), (False, True), (True, False)):
        shape = (5, 3, 4)
        x = a[: shape[2], : shape[0]].T if left else a[: shape[0], : shape[2]]
        y = b[: shape[1], : shape[2]].T if right else b[: shape[2], : shape[1]]
        found = np.ones((6, 8), kind)
        _multiply_once(address, left, right, shape, a, b, kind(1), found)
        wanted = np.ones((6, 8), kind)
        wanted[: shape[0], : shape[1]] += x @ y
        if not np.array_equal(found, wanted):
            return False
    return True


@intrinsic
def _call(typingctx, address, arguments):  # type: ignore[no-untyped-def]
    """Calls the function at `address` with the pointers in a tuple."""

    def generate(context, builder, signature, given):  # type: ignore[no-untyped-def]
        pointer = ir.IntType(8).as_pointer()
        function = ir.FunctionType(ir.VoidType(), [pointer] * len(signature.args[1]))
        values = [builder.inttoptr(builder.extract_value(given[1], i), pointer) for i in range(len(signature.args[1]))]
        builder.call(builder.inttoptr(given[0], function.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(address, arguments), generate


@numba.njit(nogil=True, error_model="numpy")
def prepare(products):  # type: ignore[no-untyped-def]
    """Fills what stays the same: the letters for "as it is" and "transposed"."""
    _, cells, _ = products
    cells[6], cells[7] = 78, 84


@numba.njit(nogil=True, error_model="numpy")
def multiply(products, left, right, m, n, k, a, a_step, b, b_step, beta, c, c_step):  # type: ignore[no-untyped-def]
    """C [m, n] = A B + beta C, row by row, with A or B transposed where `left` or `right`.  a, b and c are addresses.

    The library counts columns first, so it is asked for C' = B' A'.  `products` is (its address, CELLS int64: right for
    either width of a library's integers, two floats): the last two are room, by `prepare`.
    """
    address, cells, factors = products
    cells[0], cells[1], cells[2], cells[3], cells[4], cells[5] = n, m, k, b_step, a_step, c_step
    factors[0], factors[1] = 1, beta
    at, by = cells.ctypes.data, factors.ctypes.data
    letters = at + (56 if right else 48), at + (56 if left else 48)
    one, two = (b, at + 24), (a, at + 32)
    _call(address, (*letters, at, at + 8, at + 16, by, *one, *two, by + factors.itemsize, c, at + 40))


@numba.njit(nogil=True, cache=True, error_model="numpy")
def _multiply_once(address, left, right, shape, a, b, beta, c):  # type: ignore[no-untyped-def]
    products = address, np.empty(CELLS, np.int64), np.empty(2, a.dtype)
    prepare(products)
    m, n, k = shape
    steps = a.strides[0] // a.itemsize, b.strides[0] // b.itemsize, c.strides[0] // c.itemsize
    at = a.ctypes.data, b.ctypes.data, c.ctypes.data
    multiply(products, left, right, m, n, k, at[0], steps[0], at[1], steps[1], beta, at[2], steps[2])
