"""exp, log and sigmoid that run in vector registers, for numba kernels.

`math.exp` is a call per number, which keeps a loop from being vectorised.  These are a few multiplications for a float32,
and math's own functions for a float64.  For kernels without `reassoc`.

numba's cache does not notice a change in this file: delete `__pycache__` of this folder after one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

_LARGEST = np.float32(88.0)
_LOG2_E = np.float32(math.log2(math.e))
_LN2_HIGH = np.float32(0.693359375)
"""ln 2 in few bits, so that a small whole number times it is exact.  _LN2_LOW is the rest."""
_LN2_LOW = np.float32(math.log(2) - 0.693359375)
_ROUND = np.float32(1.5 * 2**23)
"""A float32 this large has no bits below one: adding it rounds to a whole number, subtracting it gives that back."""
_C0, _C1, _C2, _C3, _C4 = (
    np.float32(c) for c in (0.5, 0.16666577003160277, 0.041666464976110214, 0.008363175565467586, 0.0013933643523636517)
)
"""Polynomial for (exp(r) - 1 - r) / r^2, |r| <= ln 2 / 2, least squares at Chebyshev points: exp to 1e-8."""
_ONE, _BIAS, _MANTISSA = np.float32(1), np.int32(127), np.int32(23)

_HALF = np.float32(0.5)
_ROOT_HALF = np.int32(0x3F3504F3)
"""The bits of the square root of a half: a number over its power of two lies between this and twice as much."""
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (
    np.float32(c)
    for c in (
        0.3333331048488617,
        -0.25,
        0.20002245903015137,
        -0.16668511927127838,
        0.14217762649059296,
        -0.12396445125341415,
        0.11890989542007446,
        -0.11726605147123337,
        0.06800912320613861,
    )
)
"""Polynomial for (log(1 + f) - f + f^2 / 2) / f^3, 1 + f between the roots of 1/2 and 2, found the same way."""


def exp(x: Any) -> Any:
    """e^x of a float32 or a float64, at most e^88 of a float32."""
    raise NotImplementedError("for numba kernels")


def log(x: Any) -> Any:
    """The natural logarithm of a normal float32 or float64 above 0."""
    raise NotImplementedError("for numba kernels")


def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x), of a float32 to 2 units in the last place."""
    raise NotImplementedError("for numba kernels")


@register_jitable
def _exp32_of_number(y):  # type: ignore[no-untyped-def]
    """A NaN becomes e^88."""
    y = y if y < _LARGEST else _LARGEST
    y = y if y > -_LARGEST else -_LARGEST
    whole = (y * _LOG2_E + _ROUND) - _ROUND
    rest = (y - whole * _LN2_HIGH) - whole * _LN2_LOW
    tail = (((_C4 * rest + _C3) * rest + _C2) * rest + _C1) * rest + _C0
    power = np.int32((np.int32(whole) + _BIAS) << _MANTISSA).view(np.float32)
    return (tail * rest * rest + rest + _ONE) * power


@register_jitable
def _exp32(x):  # type: ignore[no-untyped-def]
    found = _exp32_of_number(x)
    return found if x == x else x  # a NaN stays one


@register_jitable
def _log32(x):  # type: ignore[no-untyped-def]
    bits = np.float32(x).view(np.int32)
    whole = np.int32(np.int32(bits - _ROOT_HALF) >> _MANTISSA)
    f = np.int32(bits - np.int32(whole << _MANTISSA)).view(np.float32) - _ONE
    tail = (((((((_L8 * f + _L7) * f + _L6) * f + _L5) * f + _L4) * f + _L3) * f + _L2) * f + _L1) * f + _L0
    scaled = np.float32(whole)
    return scaled * _LN2_HIGH + (scaled * _LN2_LOW + (tail * f * f * f - _HALF * f * f) + f)


@register_jitable
def _exp64(x):  # type: ignore[no-untyped-def]
    return math.exp(x)


@register_jitable
def _log64(x):  # type: ignore[no-untyped-def]
    return math.log(x)


@register_jitable
def _sigmoid32(x):  # type: ignore[no-untyped-def]
    return _ONE / (_ONE + _exp32_of_number(-x))  # of a NaN it is a number, but x * sigmoid(x) is still NaN


@register_jitable
def _sigmoid64(x):  # type: ignore[no-untyped-def]
    return 1.0 / (1.0 + math.exp(-x))


@overload(exp, inline="always")
def _exp(x):  # type: ignore[no-untyped-def]
    return (lambda x: _exp32(x)) if x == types.float32 else (lambda x: _exp64(x))


@overload(log, inline="always")
def _log(x):  # type: ignore[no-untyped-def]
    return (lambda x: _log32(x)) if x == types.float32 else (lambda x: _log64(x))


@overload(sigmoid, inline="always")
def _sigmoid(x):  # type: ignore[no-untyped-def]
    return (lambda x: _sigmoid32(x)) if x == types.float32 else (lambda x: _sigmoid64(x))
