"""System calls and ordered memory access for numba kernels, so that the disk tier can do I/O without the GIL.

The calls are C library symbols resolved by name, so kernels that use them can be cached like any other.
"""

from __future__ import annotations

import sys
from typing import Any

import numba
import numpy as np
from numba.core import types as _numba_types
from numba.extending import intrinsic

types: Any = _numba_types
_long, _int = types.int64, types.int32
# Variadic in C.  On every Linux ABI that numba supports, integers are passed in the same registers either way.
syscall = types.ExternalFunction("syscall", _long(_long, _long, _long, _long, _long, _long, _long))
_pread = types.ExternalFunction("pread", _long(_int, _long, _long, _long))
_pwrite = types.ExternalFunction("pwrite", _long(_int, _long, _long, _long))
_memcpy = types.ExternalFunction("memcpy", _long(_long, _long, _long))
_errno_symbol = "__error" if sys.platform == "darwin" else "__errno_location"
errno_address = types.ExternalFunction(_errno_symbol, types.CPointer(_int)())


@intrinsic
def load_acquire(typing_context: Any, words: Any, at: Any) -> Any:
    """Loads words[at] of a uint32 array that the kernel writes; all that it wrote before is visible then."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_address(context, builder, signature, arguments), "acquire", 4)

    return types.uint32(words, types.intp), generate


@intrinsic
def store_release(typing_context: Any, words: Any, at: Any, value: Any) -> Any:
    """words[at] = value in a uint32 array that the kernel reads; everything written before is visible to it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[2], _address(context, builder, signature, arguments), "release", 4)
        return context.get_dummy_value()

    return types.void(words, types.intp, types.uint32), generate


def _address(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    return builder.gep(data, [arguments[1]])


@numba.njit(nogil=True, cache=True)
def move_bytes(writing, fd, offsets, lengths, addresses, results):  # type: ignore[no-untyped-def]
    """One pread or pwrite after the other.  results[i] is the number of bytes moved, or minus the error number."""
    for i in range(offsets.shape[0]):
        if writing:
            moved = _pwrite(fd, addresses[i], lengths[i], offsets[i])
        else:
            moved = _pread(fd, addresses[i], lengths[i], offsets[i])
        results[i] = moved if moved >= 0 else -np.int64(errno_address()[0])


@numba.njit(nogil=True, cache=True)
def copy_bytes(target, source, count):  # type: ignore[no-untyped-def]
    """Copies `count` bytes from one address to another."""
    _memcpy(target, source, count)
