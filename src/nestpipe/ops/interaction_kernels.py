"""Numba kernels of DLRM's interaction on the host, without the GIL, sample by sample in buffers that stay cached.

`reassoc` lets the sum of a dot product run in vector lanes.  The order of that sum depends on the pair and the
dimension alone, so a sample has the same dots in every micro-batch.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract"})
def interact(first, others, out):  # type: ignore[no-untyped-def]
    """out[b] = the first vector of sample b, if any, then the dots of all pairs (i, j), j < i, i by i.

    `first` is [B, 1 or 0, D], `others` [B, F, D].
    """
    samples, firsts, dim = first.shape
    zero = np.zeros(1, others.dtype)[0]
    for b in range(samples):
        vectors, to = others[b], out[b]
        at = firsts * dim
        if firsts:
            for d in range(dim):
                to[d] = first[b, 0, d]
        for i in range(vectors.shape[0]):
            one = vectors[i]
            if firsts:
                p = first[b, 0]
                dot_p = zero
                for d in range(dim):
                    dot_p += one[d] * p[d]
                to[at] = dot_p
                at += 1
            j = 0
            while j + 4 <= i:  # four at a time: `one` is read once for them
                p, q, r, s = vectors[j], vectors[j + 1], vectors[j + 2], vectors[j + 3]
                dot_p = dot_q = dot_r = dot_s = zero
                for d in range(dim):
                    dot_p += one[d] * p[d]
                    dot_q += one[d] * q[d]
                    dot_r += one[d] * r[d]
                    dot_s += one[d] * s[d]
                to[at + j], to[at + j + 1], to[at + j + 2], to[at + j + 3] = dot_p, dot_q, dot_r, dot_s
                j += 4
            while j < i:
                p = vectors[j]
                dot_p = zero
                for d in range(dim):
                    dot_p += one[d] * p[d]
                to[at + j] = dot_p
                j += 1
            at += i


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath={"contract"})
def interact_backward(grads, first, others, grad_first, grad_others):  # type: ignore[no-untyped-def]
    """The gradients of both inputs: each vector's is the sum of its partners, scaled by the gradient of their dot."""
    samples, firsts, dim = first.shape
    count = firsts + others.shape[1]
    vectors = np.empty((count, dim), others.dtype)
    pairs = np.zeros((count + count % 2, count), others.dtype)  # tiles are summed for two rows at a time
    summed = np.empty((count + count % 2, dim), others.dtype)
    tile = TILE_BYTES // vectors.itemsize
    whole = dim // tile * tile
    for b in range(samples):
        for i in range(count):
            of = first[b, 0] if i < firsts else others[b, i - firsts]
            to = vectors[i]
            for d in range(dim):
                to[d] = of[d]
        at = firsts * dim
        for i in range(count):
            for j in range(i):
                pairs[i, j] = grads[b, at + j]
                pairs[j, i] = grads[b, at + j]
            at += i
        for i in range(0, count, 2):
            for d in range(0, whole, tile):
                _sum_scaled_rows(pairs, i * count, vectors, d, dim, count, summed, i * dim + d)
        if whole < dim:  # what tiles leave of a row, in the same order
            for i in range(count):
                to, of = summed[i], vectors[0]
                for d in range(whole, dim):
                    to[d] = pairs[i, 0] * of[d]
                for j in range(1, count):
                    scale, of = pairs[i, j], vectors[j]
                    for d in range(whole, dim):
                        to[d] += scale * of[d]
        for i in range(count):
            of = summed[i]
            if i < firsts:
                for d in range(dim):
                    grad_first[b, i, d] = of[d] + grads[b, d]
            else:
                to = grad_others[b, i - firsts]
                for d in range(dim):
                    to[d] = of[d]


TILE_BYTES = 128
"""The part of a row that `_sum_scaled_rows` takes at a time: four registers of AVX2 or eight of NEON."""


@intrinsic
def _sum_scaled_rows(
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
    """out[out_at:] = the sum over j < count of scales[scale_at + j] * rows[row_at + j * stride:], for one tile, j by j.
    Does the same for the next `count` scales, into out[out_at + stride:].

    All arrays have one float type and are counted flat.  In LLVM, because the sums then stay in registers: numba cannot
    know that arrays do not overlap, so in a plain loop every step loads and stores them.  Two sums at a time hide each
    other's latency.

    Plain numba gives the same bits but takes `interact_backward` 1.89 times as long (1.69 to 2.13) for 256 samples of
    27 vectors of 64 floats, 2.02 times (1.89 to 2.15) for 2048 (`python bench/kernels.py`, 2026-11-17, median and
    quartiles of 60 turns).  Taking 3, 4, 6 or 8 rows at once in its loop is no better than 1.6.
    """
    lanes = TILE_BYTES // 4 // (scales.dtype.bitwidth // 8)
    registers = 4

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kinds = signature.args

        def start_of(array: int) -> Any:
            """The address of an array's first element: its offset follows it among the arguments."""
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

        def in_all_lanes(scale: Any) -> Any:
            one = builder.insert_element(unset, builder.load(scale), short(0))
            return builder.shuffle_vector(one, unset, ir.Constant(ir.VectorType(short, lanes), [0] * lanes))

        with cgutils.for_range(builder, arguments[5], intp=long) as loop:
            scale = builder.gep(first_scale, [loop.index])
            scales_here = [in_all_lanes(scale), in_all_lanes(builder.gep(scale, [arguments[5]]))]
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
