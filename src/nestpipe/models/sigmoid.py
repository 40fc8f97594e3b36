"""A sigmoid for numba kernels that runs in vector registers: `math.exp` is a call per number, which keeps a loop out of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

_LARGEST = np.float32(88.0)
_LOG2_E = np.float32(math.log2(math.e))
_LN2_HIGH = np.float32(0.693359375)
"""ln 2 in few bits, so that a small whole number times it is exact; what is missing follows."""
_LN2_LOW = np.float32(math.log(2) - 0.693359375)
_ROUND = np.float32(1.5 * 2**23)
"""A float32 that large has no bits below one: adding it rounds to a whole number, subtracting it gives that number back."""
_C0, _C1, _C2, _C3, _C4 = (
    np.float32(c) for c in (0.5, 0.16666577003160277, 0.041666464976110214, 0.008363175565467586, 0.0013933643523636517)
)
"""(exp(r) - 1 - r) / r^2 for |r| <= ln 2 / 2 as a polynomial, fitted by least squares at Chebyshev's points: exp to 1e-8."""
_ONE, _BIAS, _MANTISSA = np.float32(1), np.int32(127), np.int32(23)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) of a float32 (to 2 units in the last place) or a float64.  In kernels without `reassoc`."""
    raise NotImplementedError("for numba kernels")


@register_jitable
def _of_float32(x):  # type: ignore[no-untyped-def]
    y = -x
    y = y if y < _LARGEST else _LARGEST  # which a NaN is not: x * sigmoid(x) is still one
    y = y if y > -_LARGEST else -_LARGEST
    whole = (y * _LOG2_E + _ROUND) - _ROUND
    rest = (y - whole * _LN2_HIGH) - whole * _LN2_LOW
    tail = (((_C4 * rest + _C3) * rest + _C2) * rest + _C1) * rest + _C0
    power = np.int32((np.int32(whole) + _BIAS) << _MANTISSA).view(np.float32)
    return _ONE / (_ONE + (tail * rest * rest + rest + _ONE) * power)


@register_jitable
def _of_float64(x):  # type: ignore[no-untyped-def]
    return 1.0 / (1.0 + math.exp(-x))


@overload(sigmoid, inline="always")
def _sigmoid(x):  # type: ignore[no-untyped-def]
    if x == types.float32:
        return lambda x: _of_float32(x)
    return lambda x: _of_float64(x)
