"""Kernels with a fault each, which the tests' own tools must notice."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def reads_past_the_end(x, out, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i), mask=i < count)


@triton.jit
def writes_past_the_end(x, out, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i, mask=i < count, other=0.0))


@triton.jit
def adds_in_any_order(x, out):  # type: ignore[no-untyped-def]
    tl.atomic_add(out, tl.load(x + tl.program_id(0)))
